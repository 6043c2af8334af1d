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
from typing import TYPE_CHECKING, Any

from streamrl.rollout.vllm.answers import tell

if TYPE_CHECKING:
    from streamrl.weight_sync.kept import KeptMaps

SERVER_PID = "STREAMRL_VLLM_SERVER_PID"
"""Environment variable of the engine's processes."""


class WorkerExtension:
    _published: Published | None = None
    _maps: KeptMaps | None = None

    def prepare_published_weights(self, path: str, about: str, answers: str) -> None:
        """Begin to read a file, while steps go on. What becomes of it is told to `answers`."""
        from streamrl.weight_sync.digest import free_threads
        from streamrl.weight_sync.kept import KeptMaps

        worker: Any = self
        parallel = worker.parallel_config
        threads = free_threads(parallel.world_size * parallel.data_parallel_size)
        self._maps = maps = self._maps or KeptMaps()
        self._published = Published(path, about, answers, maps, threads, self._published)

    def commit_published_weights(self, about: str) -> float:
        """Seconds of vLLM's own part. What it raises is the end of the engine."""
        published, self._published = self._published, None
        if published is None or published.about != about:
            raise ValueError(f"{about} is not what this worker has prepared")
        published.join()
        worker: Any = self
        began = time.monotonic()
        worker.reload_weights(weights_iterator=iter(published.tensors.items()))
        if worker.device.type == "cpu" and worker.model_config.hf_text_config.tie_word_embeddings:
            _pack_heads(worker.model_runner.get_model())
        took = time.monotonic() - began
        published.loaded()
        return took


class Published(threading.Thread):
    """Maps a file and computes its checksum, which touches all of its pages. Tells ["", checksum], or the name of a
    WeightError and its message."""

    def __init__(
        self, path: str, about: str, answers: str, maps: KeptMaps, threads: int, before: Published | None
    ) -> None:
        """`before`: was not committed."""
        super().__init__(name="published-weights", daemon=True)
        self.about, self.tensors = about, dict[str, Any]()
        self._path, self._answers, self._maps, self._threads, self._before = path, answers, maps, threads, before
        self.start()

    def run(self) -> None:
        from streamrl.weight_sync import WeightError
        from streamrl.weight_sync.digest import weights_digest

        if before := self._before:
            before.join()
            self._before = None
            self._maps.forget()  # maybe what is mapped was what is wrong
        try:
            self.tensors = self._maps.open(self._path)
            answer = ["", weights_digest(self.tensors.items(), self._threads)]
        except WeightError as error:
            answer = [type(error).__name__, str(error)]
        tell(self._answers, self.about, answer)

    def loaded(self) -> None:
        """The file may be written over."""
        if any(tensor._version for tensor in self.tensors.values()):  # a model whose loader changes what it gets
            self._maps.forget()
        self._maps.release()


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
