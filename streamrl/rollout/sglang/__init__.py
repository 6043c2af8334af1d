"""SGLang over HTTP: `server`, `calls` (requests, versions, swaps), `process` and `child` (the other Python), `wire`."""
