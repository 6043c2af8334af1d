"""vLLM: `server` (its process), `calls` (slots, versions, swaps), `worker` (what runs beside the model), `options`."""
