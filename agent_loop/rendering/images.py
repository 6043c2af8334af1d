"""Messages with images to tokens, by the processor of a model that has one.

    messages with image parts ─chat template─► text with a placeholder per image ─┐
    images of the row ─────────decoded──────────────────────────────────────────► processor ─► token ids, tensors

The text is rendered by the same template as without images; the processor puts as many placeholder tokens as an image
takes in the place of each. transformers and Pillow are imported with the first image (their load takes seconds).
"""

from __future__ import annotations

import base64
import binascii
import io
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from agent_loop.rendering.chat import ChatTokenizer, Message, RenderingError, is_image, media_of, refuse_media

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
IMAGE_MARK = "<image>"
"""In a text, verl's way to say where the next image of the row stands."""
MAX_IMAGE_BYTES = 64 << 20
KEPT = 8
"""Prompts; the tensors of one may take tens of megabytes."""

_NOT_TENSORS = ("input_ids", "attention_mask")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    ids: list[int]
    """Placeholders expanded."""
    multi_modal_inputs: dict[str, np.ndarray]
    """What the processor gives besides token ids (pixel_values, image_grid_thw, ...), its batch dimension kept."""
    images: list[bytes]
    """As they were in the row (PNG, JPEG, ...), in the order of their placeholders."""


def has_processor(directory: str | Path) -> bool:
    return any((Path(directory) / name).is_file() for name in PROCESSOR_FILES)


def with_parts(messages: Sequence[Message], images: Sequence[Any] | None) -> list[Message]:
    """Texts with marks as parts, where the row has images for them."""
    return [_split(message) if images else dict(message) for message in messages]


def media_shown(row: Mapping[str, Any], *, marks: bool = True) -> set[str]:
    """What a prompt row shows the model: "image", "video", "audio" (what is in its columns alone is for the agent
    loop). `marks`: whether they count."""
    messages = with_parts(row["raw_prompt"], row.get("images") if marks else None)
    return {kind for message in messages for kind in media_of(message)}


class ImageRenderer:
    """Thread-safe. One serves all sessions of a process, and processes one prompt at a time; what it made of the latest
    is kept, because the sessions of a group begin with the same."""

    def __init__(self, directory: str | Path, chat: ChatTokenizer) -> None:
        """`directory` has a processor (`has_processor`), which is loaded at the first image."""
        self._directory, self._chat = Path(directory), chat
        self._processor: Any = None
        self._busy = threading.Lock()
        self._latest: OrderedDict[str, RenderedPrompt] = OrderedDict()

    def render(self, row: Mapping[str, Any], tools: Sequence[dict[str, Any]] = ()) -> RenderedPrompt:
        """The prompt of a row: messages with image parts, each with its image or taking the next of the column
        `images`. Takes milliseconds to seconds; call it in a thread. Raises RenderingError."""
        messages = with_parts(row["raw_prompt"], row.get("images"))
        images = _matched(messages, list(row.get("images") or ()))
        bare = [{**message, "content": _bare(message.get("content"))} for message in messages]
        refuse_media(bare, ("video", "audio"))
        text = self._chat.prompt_text(bare, tools)
        key = _digest(text, images)
        with self._busy:
            prompt = self._latest.pop(key, None) or self._processed(text, images)
            self._latest[key] = prompt
            while len(self._latest) > KEPT:
                self._latest.popitem(last=False)
        return prompt

    def _processed(self, text: str, images: list[bytes]) -> RenderedPrompt:
        processor, pillow = self._loaded(), _pillow()
        decoded = [_decoded(pillow, image, number) for number, image in enumerate(images, 1)]
        try:
            given = processor(text=[text], images=decoded, add_special_tokens=False, return_tensors="np")
        except Exception as error:
            raise RenderingError(
                f"the processor of {self._directory} failed on a prompt with {len(images)} images: "
                f"{type(error).__name__}: {error}"
            ) from error
        tensors = {name: np.asarray(value) for name, value in given.items() if name not in _NOT_TENSORS}
        return RenderedPrompt(np.asarray(given["input_ids"])[0].tolist(), tensors, images)

    def _loaded(self) -> Any:
        if self._processor is None:
            try:
                auto = import_module("transformers").AutoProcessor
                found = auto.from_pretrained(self._directory, local_files_only=True, trust_remote_code=False)
            except Exception as error:
                raise RenderingError(
                    f"the processor of {self._directory} cannot be loaded: {type(error).__name__}: {error}"
                ) from error
            if not hasattr(found, "image_processor"):
                raise RenderingError(f"{self._directory}: its {type(found).__name__} processes no images")
            self._processor = found
        return self._processor


def _digest(text: str, images: Sequence[bytes]) -> str:
    digest = xxhash.xxh3_128(text.encode())
    for image in images:
        digest.update(f"{len(image)} ".encode())
        digest.update(image)
    return digest.hexdigest()


def _split(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or IMAGE_MARK not in content:
        return dict(message)
    texts = content.split(IMAGE_MARK)
    parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})][:-1]
    return {**message, "content": [part for part in parts if part["type"] == "image" or part["text"]]}


def _of(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _bare(content: Any) -> Any:
    """What a template may see: that there is an image, not its bytes."""
    return [{"type": "image"} if is_image(part) else part for part in content] if isinstance(content, list) else content


def _matched(messages: Sequence[Message], column: list[Any]) -> list[bytes]:
    """The bytes of each image part, in order."""
    parts = [part for message in messages for part in _of(message) if is_image(part)]
    given = [_given(part) for part in parts]
    missing = sum(image is None for image in given)
    if missing and missing != len(column):
        raise RenderingError(f"the messages have {missing} images without data of their own, the row has {len(column)}")
    rest = iter(column)
    return [_bytes(next(rest) if image is None else image, number) for number, image in enumerate(given, 1)]


def _given(part: Mapping[str, Any]) -> Any:
    """A part's own image: {"image": ...}, or {"image_url": {"url": ...}} as chat APIs have it."""
    url = part.get("image_url")
    image = part.get("image") or (url.get("url") if isinstance(url, Mapping) else url)
    if image is None and (part.get("bytes") or part.get("path")):
        return {"bytes": part.get("bytes"), "path": part.get("path")}
    return image


def _bytes(image: Any, number: int) -> bytes:
    """Of bytes, a data: URL, a path, or {"bytes": ..., "path": ...} as `datasets` stores images."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path") or image.get("image")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str) or image.startswith(("http:", "https:")):
        what = "a URL, and nothing is downloaded" if isinstance(image, str) else f"a {type(image).__name__}"
        raise RenderingError(f"image {number} is {what}; give its bytes, a data: URL or the path of a file")
    if image.startswith("data:"):
        try:
            return base64.b64decode(image.partition("base64,")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RenderingError(f"image {number}: its data: URL is not base64: {error}") from error
    path = Path(image.removeprefix("file://"))
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise RenderingError(f"image {number}: {path} has more than {MAX_IMAGE_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise RenderingError(f"image {number}: {path} cannot be read: {error.strerror}") from error


def _decoded(pillow: Any, image: bytes, number: int) -> Any:
    try:
        return pillow.open(io.BytesIO(image)).convert("RGB")
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise RenderingError(f"image {number}: {len(image)} bytes that are no readable image: {error}") from error


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise RenderingError("prompts with images need Pillow; pip install 'streamrl[images]'") from error
