"""What types cannot say: keys that must fit together, and files that must exist. Each check yields problems."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from streamrl.config import algorithm_checks, code_checks, data_files, hub
from streamrl.config.deterministic_checks import deterministic
from streamrl.config.paths import find, looked_in
from streamrl.config.remote_checks import judge
from streamrl.config.reward_model_checks import reward_model
from streamrl.config.root import StreamRLConfig
from streamrl.config.sampler_checks import sampler
from streamrl.config.sections.types import MIN_TEMPERATURE
from streamrl.config.teacher_checks import teacher
from streamrl.config.weight_sync_checks import weight_sync
from streamrl.errors import ConfigError
from streamrl.rollout.sglang.options import SUPPORT, SUPPORT_DEFAULT
from streamrl.rollout.sglang.options import check_engine_kwargs as check_sglang_kwargs
from streamrl.rollout.vllm.options import check_engine_kwargs

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def check(config: StreamRLConfig) -> None:
    """Raises ConfigError with every problem found. `config` is a derived one (streamrl.config.derive)."""
    problems = [problem for one_check in CHECKS for problem in one_check(config)]
    if problems:
        raise ConfigError(*problems)


def _batches(config: StreamRLConfig) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    n, ranks = config.actor_rollout_ref.rollout.n, config.trainer.n_gpus_per_node * config.trainer.nnodes
    names = f"data.train_batch_size={batch} and {ACTOR}.ppo_mini_batch_size={mini}"
    if mini > batch:
        yield f"{names}: a mini-batch cannot be larger than the batch (both count prompts)"
    elif batch % mini:
        yield f"{names}: the batch must be a multiple of the mini-batch (both count prompts)"
    elif config.trainer.v1.trainer_mode == "separate_async":
        sync = config.trainer.v1.separate_async.parameter_sync_step
        if batch != sync * mini:
            yield (
                f"{names}: with trainer_mode=separate_async the batch is parameter_sync_step={sync} mini-batches; "
                f"set trainer.v1.separate_async.parameter_sync_step={batch // mini}"
            )
    if mini * n < ranks:
        yield f"a mini-batch of {mini} prompts x n={n} has fewer rows than the {ranks} training ranks"


def _actor(config: StreamRLConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.clip_ratio_c <= 1:
        yield f"{ACTOR}.clip_ratio_c={actor.clip_ratio_c:g}: the dual clip bounds a ratio above 1; verl's value is 3.0"
    if actor.clip_ratio_low is not None and actor.clip_ratio_low >= 1:
        yield f"{ACTOR}.clip_ratio_low={actor.clip_ratio_low:g} must be below 1 (the ratio is clipped at 1 - it)"
    for key, part in ((ACTOR, actor), ("critic", config.critic)):
        if not part.use_dynamic_bsz and part.ppo_micro_batch_size_per_gpu is None:
            yield f"{key}.use_dynamic_bsz=false needs {key}.ppo_micro_batch_size_per_gpu: rows per micro-batch"
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if ranks % actor.ulysses_sequence_parallel_size:
        yield (
            f"{ACTOR}.ulysses_sequence_parallel_size={actor.ulysses_sequence_parallel_size} must divide the {ranks} "
            "training ranks (trainer.nnodes x trainer.n_gpus_per_node)"
        )


def _validation_weights(config: StreamRLConfig) -> Iterator[str]:
    separate, servers = config.trainer.v1.separate_async, config.actor_rollout_ref.rollout.num_replicas
    if separate.validation_weights == "pin" and servers <= separate.validation_servers:
        yield (
            f"trainer.v1.separate_async.validation_weights=pin keeps {separate.validation_servers} servers "
            f"(validation_servers) for validation, of {ROLLOUT}.num_replicas={servers}: none is left for training; "
            "raise num_replicas, or use hold or mixed"
        )


def _lengths(config: StreamRLConfig) -> Iterator[str]:
    data, context = config.data, config.actor_rollout_ref.rollout.max_model_len
    need = data.max_prompt_length + data.max_response_length
    if context is not None and context < need:
        yield (
            f"{ROLLOUT}.max_model_len={context} is shorter than data.max_prompt_length + data.max_response_length "
            f"= {need}; raise it or shorten one of them"
        )


def _validation(config: StreamRLConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.val_only and (trainer.replay or trainer.resume_mode == "resume_path"):
        yield (
            "trainer.val_only=true validates a model in a run of its own, and goes on with no other; leave out "
            "trainer.replay and resume_from_path. For a checkpoint: streamrl export RUN DIRECTORY, then "
            "actor_rollout_ref.model.path=DIRECTORY"
        )
    asked, key = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if asked.temperature is None:
        return
    if 0 < asked.temperature < MIN_TEMPERATURE:
        yield f"{key}.temperature={asked.temperature:g} is not allowed; it takes 0, or a number >= {MIN_TEMPERATURE:g}"
    elif asked.do_sample and asked.temperature == 0:
        yield f"{key}.do_sample=true with temperature=0 samples nothing; set a temperature, or do_sample=false"
    elif asked.do_sample is False and asked.temperature > 0:
        yield (
            f"{key}.do_sample=false with temperature={asked.temperature:g} contradict each other; set do_sample=true "
            "to sample at it, or temperature=0"
        )


def _placement(config: StreamRLConfig) -> Iterator[str]:
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if config.runtime == "local" and ranks > 1:
        yield f"runtime=local trains in one process, not {ranks} ranks; set trainer.n_gpus_per_node=1 trainer.nnodes=1"
    rollout, simulated = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.strategy == "sim"
    if simulated and config.runtime != "local":
        yield f"{ACTOR}.strategy=sim runs in one process; set runtime=local"
    algorithm = config.algorithm
    on_ranks = config.critic.enable or algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    if simulated and on_ranks:
        yield f"{ACTOR}.strategy=sim has no model: neither critic nor reference can stand beside it"
    if rollout.name == "sim" and rollout.sim.clock == "virtual" and not simulated:
        yield f"{ROLLOUT}.sim.clock=virtual needs a simulated actor, too; set runtime=local {ACTOR}.strategy=sim"


def sleep_level(config: StreamRLConfig) -> Iterator[str]:
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.sleep_level"
    if rollout.sleep_level is None:
        return
    if rollout.name != "vllm":
        release = f"{ROLLOUT}.sglang.release_memory"
        yield f"{key} is vLLM's; the embedded engine always gives its cache up, SGLang with {release}"
    elif config.trainer.device == "cpu":
        yield f"{key}: on a CPU vLLM cannot give memory up; leave it out, or set trainer.device=cuda"
    elif config.trainer.v1.trainer_mode != "colocate_async":
        mode = config.trainer.v1.trainer_mode
        yield f"{key} does nothing in trainer_mode={mode}: servers sleep in colocate_async alone"


def _vllm(config: StreamRLConfig) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.name != "vllm" or config.actor_rollout_ref.rollout.server:
        return
    if config.trainer.deterministic:
        yield f"{ROLLOUT}.name=vllm with trainer.deterministic=true: its samples depend on the batch; set name=torch"
    if config.actor_rollout_ref.rollout.temperature > 2:
        yield f"{ROLLOUT}.temperature={config.actor_rollout_ref.rollout.temperature:g}: vLLM takes up to 2"
    try:
        check_engine_kwargs(config.actor_rollout_ref.rollout.engine_kwargs.vllm)
    except ValueError as error:
        yield str(error)


def _sglang(config: StreamRLConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    key, given = f"{ROLLOUT}.sglang", rollout.sglang
    if rollout.name != "sglang":
        if given.python or given.url:
            yield f"{key} does nothing with {ROLLOUT}.name={rollout.name}; set name=sglang"
        return
    if config.trainer.deterministic:
        yield f"{ROLLOUT}.name=sglang with trainer.deterministic=true: its samples depend on the batch; set name=torch"
    if bool(given.python) == bool(given.url):
        yield f"{ROLLOUT}.name=sglang needs {key}.python, the interpreter of its environment, or {key}.url; one of them"
    elif given.url and rollout.num_replicas != 1:
        yield f"{key}.url is one server, but {ROLLOUT}.num_replicas={rollout.num_replicas}; set 1, or {key}.python"
    elif given.python and not os.access(os.path.expanduser(given.python), os.X_OK):
        yield f"{key}.python={given.python} is no interpreter that can be run"
    limit = given.engine_kwargs.get(SUPPORT, SUPPORT_DEFAULT)
    if given.python and isinstance(limit, int) and rollout.top_k > limit:
        yield (
            f"{ROLLOUT}.top_k={rollout.top_k}: SGLang tells log-probs after cuts for top_k up to {limit}; lower it, "
            f"or set {key}.engine_kwargs.{SUPPORT}"
        )
    try:
        check_sglang_kwargs(given.engine_kwargs)
    except ValueError as error:
        yield str(error)


def _datasets(config: StreamRLConfig) -> Iterator[str]:
    data, trainer = config.data, config.trainer
    if not data.train_files and not data.custom_cls.path:
        yield "data.train_files is not set; name files (jsonl, parquet, ...), or start with experiment=calculator"
    if not data.val_files and trainer.val_only:
        yield "data.val_files is not set, and trainer.val_only=true does nothing but validate on them; name files"
    elif not data.val_files and (trainer.val_before_train or trainer.test_freq > 0):
        yield "data.val_files is not set; name files, or set trainer.val_before_train=false and trainer.test_freq=-1"
    if data.custom_cls.path:  # its files are its own business
        if not data.custom_cls.name:
            yield f"data.custom_cls.name is not set; name what gives the rows in {data.custom_cls.path}"
        else:
            yield from code_checks.file_object("data.custom_cls.path", data.custom_cls.path, data.custom_cls.name)
        return
    for key, entries in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for entry in entries:
            yield from data_files.problems(key, entry)


def _hub_hint(path: str) -> str:
    return "; without --dry-run `streamrl train` downloads it from the hub" if hub.is_hub_id(path) else ""


def _model(config: StreamRLConfig) -> Iterator[str]:
    model, parts = config.actor_rollout_ref.model, config.actor_rollout_ref
    simulated = parts.actor.strategy == "sim" and parts.rollout.name == "sim"  # then only the tokenizer is read
    key = "actor_rollout_ref.model.path"
    if not model.path:
        yield f"{key} is not set; name a directory with config.json, safetensors weights and tokenizer"
    elif find(model.path) is None:
        yield f"{key}: there is no directory {model.path}{looked_in(model.path)}{_hub_hint(model.path)}"
    elif not simulated and not Path(model.path, "config.json").is_file():
        yield f"{key}: {model.path} has no config.json, so it is no model directory"
    elif model.tokenizer_path and not any(Path(model.tokenizer_path).glob("tokenizer*")):
        yield f"actor_rollout_ref.model.tokenizer_path: there is no tokenizer in {model.tokenizer_path}"
    elif not simulated:
        yield from _context(config)


def _context(config: StreamRLConfig) -> Iterator[str]:
    """Prompt and response must fit the positions that the model knows."""
    asked, path = (
        config.actor_rollout_ref.rollout.max_model_len,
        Path(config.actor_rollout_ref.model.path, "config.json"),
    )
    try:
        limit = json.loads(path.read_text()).get("max_position_embeddings")
    except (ValueError, AttributeError):
        yield f"actor_rollout_ref.model.path: {path} is no JSON object"
        return
    if isinstance(limit, int) and asked is not None and asked > limit:
        yield (
            f"{ROLLOUT}.max_model_len={asked} (by default data.max_prompt_length={config.data.max_prompt_length} + "
            f"data.max_response_length={config.data.max_response_length}) exceeds the model's max_position_embeddings="
            f"{limit}; lower data.max_prompt_length or data.max_response_length"
        )


def _directories(config: StreamRLConfig) -> Iterator[str]:
    trainer, storage = config.trainer, config.transfer_queue.storage_dir
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        yield (
            f"trainer.resume_mode={trainer.resume_mode} with resume_from_path={trainer.resume_from_path or 'null'}: "
            "resume_mode=resume_path and a run directory in resume_from_path go together"
        )
    elif (path := trainer.resume_from_path) and not Path(path).is_dir():
        yield f"trainer.resume_from_path: there is no directory {path}{looked_in(path)}"
    if trainer.replay is not None:
        replayed = Path(trainer.replay)
        if not (replayed / "batches.jsonl").is_file():
            yield f"trainer.replay: {trainer.replay} is no run directory{looked_in(trainer.replay)}"
        elif not any(replayed.glob("trajectories/step-*.safetensors")):
            yield f"trainer.replay: {replayed} holds no trajectories; record a run with trainer.record=true first"
        if trainer.record:
            yield "trainer.record with trainer.replay would record the same trajectories again; leave one of them out"
    if storage is not None and not (Path(storage).is_dir() and os.access(storage, os.W_OK)):
        yield f"transfer_queue.storage_dir: {storage} is no writable directory"
    for key in ("runs_dir", "rollout_data_dir", "validation_data_dir"):
        if (directory := getattr(trainer, key)) is not None:
            wanted = Path(directory)
            existing = next(path for path in (wanted, *wanted.parents) if os.path.exists(path))
            if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
                yield f"trainer.{key}: cannot make {wanted}: {existing} is no writable directory"


def _memory(config: StreamRLConfig) -> Iterator[str]:
    queue = config.transfer_queue
    if queue.unit_budget_bytes < queue.segment_bytes:
        yield (
            f"transfer_queue.unit_budget_bytes={queue.unit_budget_bytes} holds not even one segment of "
            f"transfer_queue.segment_bytes={queue.segment_bytes}; raise the budget or make segments smaller"
        )


CHECKS: tuple[Callable[[StreamRLConfig], Iterator[str]], ...] = (
    _batches, sampler, _validation_weights, algorithm_checks.algorithm, _actor, algorithm_checks.correction, _lengths,
    _validation, _placement, sleep_level, _vllm, _sglang, _datasets, _model, teacher, judge, reward_model, weight_sync,
    deterministic, code_checks.code, code_checks.names, code_checks.trackers, _directories, _memory,
)  # fmt: skip


def check_ports(config: StreamRLConfig) -> None:
    """Raises ConfigError for a port that cannot be bound now. Not part of `check`: a dry run binds nothing."""
    prometheus = config.monitor.prometheus
    if not prometheus.enabled or prometheus.port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((prometheus.host, prometheus.port))
        except OSError as error:
            raise ConfigError(
                f"monitor.prometheus.port={prometheus.port} cannot be used on {prometheus.host}: {error.strerror}; "
                "choose another, or 0 for any free one"
            ) from error
