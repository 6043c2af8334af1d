"""The datasets of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import agent_loop.loops.single_turn  # noqa: F401  # registers itself
from agent_loop.loop import AGENT_LOOPS
from agent_loop.loops.tool import selected_tools
from agent_loop.plugins import PluginError, is_path_spec, load_from_file
from agent_loop.rendering.chat import ChatTokenizer, RenderingError, TemplateArgumentError
from agent_loop.rendering.images import has_processor, media_shown
from agent_loop.tools.base import Tool, load_tool, tool_schema
from streamrl.config import StreamRLConfig
from streamrl.config.sections.data import DataConfig
from streamrl.data.columns import Columns
from streamrl.data.dataset import PromptDataset, Tell, log
from streamrl.data.formats import Place, found
from streamrl.data.lengths import PromptLimit
from streamrl.data.sources import Indexed, Once, Source, sources_of
from streamrl.errors import DatasetError


def train_dataset(config: StreamRLConfig, tell: Tell = log.info) -> PromptDataset:
    """Every few seconds of reading `tell` gets a line. Raises DatasetError, also when there are fewer prompts than one
    batch takes."""
    data = config.data
    dataset = _dataset(config, "train", data.train_files, data.train_max_samples, data.seed or 0, data.shuffle, tell)
    if len(dataset) < data.train_batch_size:
        raise DatasetError(
            f"{', '.join(data.train_files)}: {len(dataset)} prompts are fewer than data.train_batch_size="
            f"{data.train_batch_size}; lower it or add prompts"
        )
    return dataset


def val_dataset(config: StreamRLConfig, tell: Tell = log.info) -> PromptDataset | None:
    """In the order of the files; None when no validation file is named. Raises DatasetError."""
    data = config.data
    return _dataset(config, "val", data.val_files, data.val_max_samples, 0, False, tell) if data.val_files else None


def training_steps(config: StreamRLConfig, rows: int) -> int:
    """`trainer.total_training_steps`, or what `trainer.total_epochs` over `rows` prompts makes."""
    trainer = config.trainer
    return trainer.total_training_steps or trainer.total_epochs * (rows // config.data.train_batch_size)


def _dataset(
    config: StreamRLConfig, split: str, files: tuple[str, ...], max_samples: int, seed: int, shuffle: bool, tell: Tell
) -> PromptDataset:
    return PromptDataset.from_sources(
        _sources(config.data, files, split),
        ", ".join(files) or "no files",
        seed=seed,
        shuffle=shuffle,
        max_samples=max_samples,
        columns=columns_of(config.data),
        limit=_limit(config),
        check=_check(config),
        tell=tell,
    )


def _check(config: StreamRLConfig) -> Callable[[dict[str, Any], Place], None]:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    names = AgentNames(rollout.agent.default_agent_loop)
    marks_count = has_processor(model.tokenizer_path or model.path)

    def check(row: dict[str, Any], place: Place) -> None:
        names.check(row, place)
        if media := media_shown(row, marks=marks_count):
            raise DatasetError(
                f"{place}: the messages show the model {' and '.join(sorted(media))}; training engines and the "
                f"servers of {rollout.name} take text alone. Leave such rows out; what is beside the messages reaches "
                "the agent loop"
            )

    return check


@dataclass(frozen=True, slots=True)
class AgentNames:
    """The agent loops that rows may name: registered ones and the configured default. A row never loads a file."""

    default: str

    def check(self, row: dict[str, Any], place: Place) -> None:
        """Raises DatasetError for a row that names none of them."""
        name = row["agent_name"]
        if name is None or name == self.default or name in AGENT_LOOPS:
            return
        if is_path_spec(self.default):  # its file may register others
            try:
                load_from_file(self.default, "agent loop")
            except PluginError as error:
                raise DatasetError(f"actor_rollout_ref.rollout.agent.default_agent_loop: {error}") from error
        if name not in AGENT_LOOPS:
            known = ", ".join(sorted({*AGENT_LOOPS.names(), self.default}))
            raise DatasetError(
                f"{place}, column 'agent_name': there is no agent loop {found(name)}; rows may name {known} (one more "
                "may be set as actor_rollout_ref.rollout.agent.default_agent_loop)"
            )


def columns_of(data: DataConfig) -> Columns:
    """Keys that were set replace the table's names; those at their default only add to it."""
    default = DataConfig()
    keys = {
        "prompt": (data.prompt_key, default.prompt_key),
        "data_source": (data.reward_fn_key, default.reward_fn_key),
        "ground_truth": (data.label_key, None),
        "extra_info": (data.metadata_key, None),
        "images": (data.image_key, default.image_key),
        "videos": (data.video_key, default.video_key),
        "audios": (data.audio_key, default.audio_key),
    }
    return Columns({column: key for column, (key, usual) in keys.items() if key is not None and key != usual})


def _sources(data: DataConfig, files: tuple[str, ...], split: str) -> list[Source]:
    if not data.custom_cls.path:
        return list(sources_of(files))
    spec = f"{data.custom_cls.path}:{data.custom_cls.name}"
    try:
        made = load_from_file(spec, "dataset")(data_files=list(files), config=data, split=split)
        return [Indexed(spec, made) if _has_numbers(made) else Once(spec, iter(made))]
    except PluginError as error:
        raise DatasetError(f"data.custom_cls: {error}") from error
    except TypeError as error:
        raise DatasetError(
            f"data.custom_cls: {spec} is called with data_files, config and split and gives rows: {error}"
        ) from error


def _has_numbers(rows: Any) -> bool:
    return hasattr(rows, "__getitem__") and hasattr(rows, "__len__")


def _limit(config: StreamRLConfig) -> PromptLimit | None:
    """None without a tokenizer (a configuration that was not checked)."""
    model, data, rollout = config.actor_rollout_ref.model, config.data, config.actor_rollout_ref.rollout
    if not (path := model.tokenizer_path or model.path):
        return None
    try:
        chat = ChatTokenizer.from_pretrained(path, data.apply_chat_template_kwargs)
        loaded = [load_tool(spec, **settings) for spec, settings in rollout.tools.items()]
    except TemplateArgumentError as error:
        raise DatasetError(
            f"data.apply_chat_template_kwargs={data.apply_chat_template_kwargs}: {error}; leave out what it does not "
            f"take (the template is that of {path})"
        ) from error
    except (RenderingError, PluginError) as error:
        raise DatasetError(f"the prompts cannot be counted: {error}") from error
    tools = {tool.name: tool for tool in loaded}
    default = rollout.agent.default_agent_loop
    return PromptLimit(
        chat,
        data.max_prompt_length,
        "drop" if data.filter_overlong_prompts else data.truncation,
        lambda row: _schemas(row, tools, default),
    )


def _schemas(row: dict[str, Any], tools: Mapping[str, Tool], default_loop: str) -> list[dict[str, Any]]:
    if (row["agent_name"] or default_loop) != "tool_agent":
        return []
    return [tool_schema(tool) for tool in selected_tools(tools, row["tool_selection"]).values()]
