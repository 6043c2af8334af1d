"""Code that the configuration names: the user's files, and what is shipped under a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from agent_loop.loop import load_agent_loop
from agent_loop.plugins import PluginError, is_path_spec
from agent_loop.rewards import REWARDS
from agent_loop.tools.base import load_tool
from streamrl.config.classes import AGENT_LOOP, TOOL, TRACKER, Use, class_misfits
from streamrl.config.paths import defines, definitions, looked_in, registered, split_file_object
from streamrl.config.root import StreamRLConfig
from streamrl.config.signatures import JUDGED_REWARD, POLICY_LOSS, REWARD, SERVER, Caller, misfits
from streamrl.monitor.trackers import BUILT_IN, LIBRARIES

ACTOR = "actor_rollout_ref.actor"
LOSSES = "streamrl.algorithms.policy_losses"
ROLLOUT = "actor_rollout_ref.rollout"


def code(config: StreamRLConfig) -> Iterator[str]:
    """Files of the user's, looked into."""
    custom = config.reward.custom_reward_function
    if custom.path:
        key = "reward.custom_reward_function.path"
        caller = JUDGED_REWARD if config.reward.judge.given else REWARD
        yield from file_object(key, custom.path, custom.name, caller, tuple(custom.reward_kwargs))
    rollout, loss = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.policy_loss
    if written := split_file_object(loss.loss_mode):
        yield from file_object(f"{ACTOR}.policy_loss.loss_mode", *written, POLICY_LOSS)
    if rollout.server is not None:
        yield from _beside_server(config)
        if written := split_file_object(rollout.server):
            yield from file_object(f"{ROLLOUT}.server", *written, SERVER)
        else:
            yield f"{ROLLOUT}.server={rollout.server}: expected path/to/file.py:function; name= is for what is shipped"
    if written := split_file_object(rollout.agent.default_agent_loop):
        yield from file_class(f"{ROLLOUT}.agent.default_agent_loop", *written, AGENT_LOOP)
    for name, settings in rollout.tools.items():
        if written := split_file_object(name):
            yield from file_class(f"{ROLLOUT}.tools", *written, TOOL, settings, f"{ROLLOUT}.tools.{name}")
    for written in filter(None, map(split_file_object, config.trainer.logger)):
        yield from file_class("trainer.logger", *written, TRACKER)


def _beside_server(config: StreamRLConfig) -> Iterator[str]:
    """What goes with a server of ours, and is nothing that one of the user's is known to do."""
    rollout = config.actor_rollout_ref.rollout
    given, backend = f"{ROLLOUT}.server={rollout.server}", rollout.weight_sync.backend
    if rollout.name in ("vllm", "sglang"):
        yield f"{given} takes the place of {ROLLOUT}.name={rollout.name}, whose keys do nothing then; leave one out"
    if backend in ("delta", "collective"):
        yield (
            f"{ROLLOUT}.weight_sync.backend={backend} with {given}: a server of your own is given files of full "
            "weights; set shm or disk"
        )
    if config.trainer.deterministic:
        yield (
            f"trainer.deterministic=true with {given}: its samples may depend on the batch, and it takes no requests "
            f"that name a weight version; leave {ROLLOUT}.server out, with name=torch or sim"
        )


def names(config: StreamRLConfig) -> Iterator[str]:
    """What is shipped under a name is made once here; a user's own file is only looked into."""
    rollout, reward = config.actor_rollout_ref.rollout, config.reward.custom_reward_function
    try:
        if not is_path_spec(rollout.agent.default_agent_loop):
            load_agent_loop(rollout.agent.default_agent_loop)
    except PluginError as error:
        yield f"{ROLLOUT}.agent.default_agent_loop: {error}"
    loss, losses = config.actor_rollout_ref.actor.policy_loss, registered(LOSSES, "register_policy_loss")
    if not is_path_spec(loss.loss_mode) and loss.loss_mode not in losses:
        yield (
            f"{ACTOR}.policy_loss.loss_mode: unknown policy loss {loss.loss_mode!r}; known: {', '.join(losses)}, or "
            "'path/to/file.py:function'"
        )
    if reward.path is None and config.reward.function and reward.name not in REWARDS:
        yield (
            f"reward.custom_reward_function.path is not set and no reward is registered as {reward.name!r}; "
            f"name a Python file, or set reward.custom_reward_function.name to one of {', '.join(REWARDS.names())} "
            "(verl's own scorers, which it takes by data_source, are not here)"
        )
    for name, kwargs in rollout.tools.items():
        try:
            if not is_path_spec(name):
                load_tool(name, **kwargs)
        except (PluginError, ValueError) as error:
            yield f"{ROLLOUT}.tools.{name}: {error}"


def trackers(config: StreamRLConfig) -> Iterator[str]:
    known = (*BUILT_IN, *LIBRARIES)
    for name in config.trainer.logger:
        if not is_path_spec(name) and name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            yield f"trainer.logger: unknown tracker {name!r}; {hint}known: {', '.join(known)}, or path/to/file.py:Class"


def file_object(
    key: str, file: str, name: str, caller: Caller | None = None, more: tuple[str, ...] = ()
) -> Iterator[str]:
    """A file that does not define `name`, or, where it is a function with a `caller`, takes other arguments."""

    def looked_into(path: Path) -> Iterator[str]:
        return misfits(path, name, caller, more) if caller is not None else iter(())

    yield from _in_file(key, file, name, looked_into)


def file_class(
    key: str, file: str, name: str, use: Use, keywords: Iterable[str] = (), said_by: str = ""
) -> Iterator[str]:
    """A file that does not define `name`, or, where it is a class, whose class takes no such `keywords`, which the
    setting `said_by` gives, or lacks a method."""
    yield from _in_file(key, file, name, lambda path: class_misfits(path, name, use, keywords, said_by))


def _in_file(key: str, file: str, name: str, look: Callable[[Path], Iterator[str]]) -> Iterator[str]:
    if not file or not name:
        written, defined = file or name, ""
        with suppress(OSError, SyntaxError, UnicodeDecodeError):
            defined = ", ".join(definitions(Path(written)))
        yield f"{key}={written}: expected path/to/file.py:name" + (f"; it defines {defined}" if defined else "")
        return
    if not Path(file).is_file():
        yield f"{key}: there is no file {file}{looked_in(file)}"
        return
    try:
        if not defines(Path(file), name):
            yield f"{key}: {file} defines no {name}; it defines {', '.join(definitions(Path(file))) or 'nothing'}"
        else:
            yield from (f"{key}: {problem}" for problem in look(Path(file)))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield f"{key}: {file} is no valid Python: {error}"
