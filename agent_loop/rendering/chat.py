"""Text to tokens and back, for a Hugging Face model directory, without importing transformers or torch.

History is extended, never re-rendered: `render_prompt` makes the first ids, and from then on `render_tool_results`
only gives the ids that follow the assistant's own, up to and including the next generation prompt.
(`tokenizers` and `jinja2` load in 0.07 s; `transformers` takes 0.7 s and ten times the memory.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": str, ...}"""

_ASKED, _ANSWERED = "a question", "AN-ANSWER-OF-THE-ASSISTANT"
"""A made-up turn, in whose place the real history stands."""
_MEDIA = {
    "image": "image", "image_url": "image", "video": "video", "video_url": "video", "audio": "audio",
    "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
"""Type of a part -> what it is, in the words of several chat APIs."""
_OURS = frozenset({"messages", "tools", "add_generation_prompt"})


TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""A template runs over whatever stands in the messages."""


class RenderingError(ValueError):
    """The model directory or its chat template cannot render what was asked."""


class TemplateArgumentError(RenderingError):
    """An argument that the chat template does not take."""


class ChatTokenizer:
    """A tokenizer with its chat template. Stateless after construction, so one serves all sessions of a process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        special: dict[str, str],
        stop_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`special` maps names as the template knows them ("eos_token") to their text; `template_kwargs` are further
        ones (enable_thinking). Raises RenderingError for one that the template does not ask for."""
        self.tokenizer = tokenizer
        self.special = special
        eos = tokenizer.token_to_id(special["eos_token"]) if special.get("eos_token") else None
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*stop_token_ids, *([] if eos is None else [eos])}))
        """Tokens that end an assistant turn."""
        forged = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self._forged = re.compile(
            "|".join(map(re.escape, sorted(filter(None, forged), key=len, reverse=True))) or "(?!)"
        )
        self._longest = max(map(len, forged), default=0)
        environment = _environment()
        self._template = environment.from_string(template)
        self._given = dict(template_kwargs or {})
        _check_given(self._given, jinja2.meta.find_undeclared_variables(environment.parse(template)))

    @classmethod
    def from_pretrained(cls, directory: str | Path, template_kwargs: Mapping[str, Any] | None = None) -> ChatTokenizer:
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json (the last two
        may be missing). Raises RenderingError naming the file and what is missing in it."""
        path = Path(directory)
        if not (path / "tokenizer.json").is_file():
            raise RenderingError(f"{path} has no tokenizer.json; save the model's fast tokenizer there")
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        config = _read_json(path / "tokenizer_config.json")
        known = tokenizer.get_vocab(with_added_tokens=True)
        for token in config.get("added_tokens_decoder", {}).values():
            if token["content"] not in known:
                tokenizer.add_tokens([AddedToken(**token)])
        special = {
            name: text for name, value in config.items() if name.endswith("_token") and (text := _token_text(value))
        }
        stop = _read_json(path / "generation_config.json").get("eos_token_id")
        stop_ids = [stop] if isinstance(stop, int) else list(stop or ())
        text = _template_text(path, config)
        return cls(tokenizer, text, special=special, stop_token_ids=stop_ids, template_kwargs=template_kwargs)

    def encode(self, text: str) -> list[int]:
        """Without special tokens added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The conversation and the generation prompt of the assistant's next turn. `tools` are JSON schemas. Raises
        RenderingError for messages with media, which a tokenizer alone would leave as a placeholder each."""
        refuse_media(messages, _MEDIA.values())
        return self.encode(self.prompt_text(messages, tools))

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        """What `render_prompt` encodes."""
        return self._render(messages, tools, add_generation_prompt=True)

    def render_tool_results(self, results: Sequence[str], *, after: int | None = None) -> list[int]:
        """What follows an assistant turn whose last token is `after`: the end of the turn if the model did not sample
        it itself, one tool message per result, and the next generation prompt.

        Special tokens inside a result are removed: a tool's text cannot forge a turn.
        """
        turn: list[Message] = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}]
        answers: list[Message] = [{"role": "tool", "content": self._disarm(result)} for result in results]
        _, found, rest = self._render([*turn, *answers], (), add_generation_prompt=True).partition(_ANSWERED)
        if not found:
            raise RenderingError(
                "the chat template leaves out the assistant's message; tool turns need one that keeps it"
            )
        ended = "" if after is None else self.decode([after])
        if after in self.stop_token_ids and rest.startswith(ended):
            rest = rest[len(ended) :]
        return self.encode(rest)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special, **self._given},
            )
        except TEMPLATE_ERRORS as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise RenderingError(f"the chat template failed on {len(messages)} messages: {kind}{error}") from error

    def _disarm(self, text: str) -> str:
        """Without special tokens, also without those that arise when one is taken out of the middle of another."""
        start = 0
        while found := self._forged.search(text, start):
            text = text[: found.start()] + text[found.end() :]
            start = max(0, found.start() - self._longest)
        return text


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training masks; here it is just text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for (as transformers sets it up)."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def media_of(message: Message) -> list[str]:
    """The kinds of its parts that are no text: "image", "video", "audio"."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [_MEDIA[part["type"]] for part in parts if isinstance(part, dict) and part.get("type") in _MEDIA]


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and _MEDIA.get(part.get("type", "")) == "image"


def refuse_media(messages: Sequence[Message], kinds: Collection[str]) -> None:
    """Raises RenderingError for a message with media of these kinds."""
    for number, message in enumerate(messages, 1):
        if found := [kind for kind in media_of(message) if kind in kinds]:
            raise RenderingError(
                f"message {number} has {found[0]}s among its parts; a prompt may have images, where the model "
                "directory has a processor and the agent loop begins with `await ctx.begin(row)`, and nothing else "
                "besides text"
            )


def _check_given(given: Mapping[str, Any], read: set[str]) -> None:
    """Raises RenderingError for arguments of a template that cannot be what was meant."""
    for name in given:
        if name in _OURS:
            raise TemplateArgumentError(
                f"the chat template's argument {name!r} is set for each prompt and cannot be given"
            )
        if name not in read:
            others = sorted(other for other in read - {*_OURS, *_environment().globals} if not other.endswith("_token"))
            instead = f"it asks for {', '.join(others)}" if others else "it takes no arguments of its own"
            raise TemplateArgumentError(f"the chat template does not ask for {name!r}; {instead}")


def _template_text(path: Path, config: dict[str, Any]) -> str:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use") or named.get("default")
    if not template:
        raise RenderingError(
            f"{path} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json"
        )
    return template


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RenderingError(f"{path} is not JSON: {error}") from error
