"""What the processes of vLLM's workers do for us: load published weights, and end when their server has ended.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by name, between two
steps, on every worker. On a CPU vLLM packs its weights for the processor, so that a plain `load_weights` finds empty
parameters; `reload_weights` unpacks, loads and packs again.

A server that is killed tells nobody. The engine's process would wait for requests for ever, with its memory; so a
thread in every worker waits for the end of the process that `SERVER_PID` names.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Any

SERVER_PID = "STREAMRL_VLLM_SERVER_PID"
"""Environment variable of the engine's processes."""


class WorkerExtension:
    """Nothing is raised for weights that were refused before anything was overwritten: the server decides."""

    def load_published_weights(self, path: str) -> list[str]:
        """["loaded", digest, seconds of vLLM's own part], or ["WeightsMissing" | "WeightsDamaged", message] and the old
        weights stay."""
        from streamrl.weight_sync import WeightError
        from streamrl.weight_sync.digest import weights_digest
        from streamrl.weight_sync.shared_memory import read_weights

        try:
            tensors = read_weights(path)
            digest = weights_digest(tensors.items())  # also touches every page, before anything is overwritten
        except WeightError as error:
            return [type(error).__name__, str(error)]
        worker: Any = self
        began = time.monotonic()
        worker.reload_weights(weights_iterator=iter(tensors.items()))
        if worker.device.type == "cpu" and worker.model_config.hf_text_config.tie_word_embeddings:
            _pack_heads(worker.model_runner.get_model())
        return ["loaded", digest, repr(time.monotonic() - began)]


def _pack_heads(model: Any) -> None:
    """A head that is tied to the embeddings has their new weights now, but multiplies by its own packed copy of the
    old ones: no file names its weights, so `reload_weights` leaves it alone (vLLM 0.32)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # pyright: ignore[reportMissingImports]

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def end_with(pid: int) -> None:
    """Kill this process as soon as process `pid` has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-server", daemon=True).start()


if (_server := os.environ.get(SERVER_PID)) and int(_server) != os.getpid():
    end_with(int(_server))
