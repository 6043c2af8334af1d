"""Prompts with images: placeholders by the model's processor, its tensors in the queue, the images at the server."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from agent_loop.rendering.chat import ChatTokenizer, RenderingError
from agent_loop.rendering.images import ImageRenderer, has_processor, media_shown
from tests.agents.fakes import FakeServer, byte_tokenizer, says
from tests.agents.farm import farm

SIDE, PATCH = 28, 14
TOKENS = (SIDE // PATCH) ** 2
"""Placeholders that an image becomes."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a model of this kind has it, without the model: a processor made from its configuration."""
    pytest.importorskip("PIL")
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("vision")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(
        images, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>"), patch_size=PATCH,
        vision_feature_select_strategy="full", image_token="<image>", chat_template=TEMPLATE,
    ).save_pretrained(directory)  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def chat(model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def renderer(model: Path, chat: ChatTokenizer) -> ImageRenderer:
    return ImageRenderer(model, chat)


def png(level: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 30), (level, level, level)).save(file, "PNG")
    return file.getvalue()


def asks(*parts: Any, images: Any = None) -> dict[str, Any]:
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)
    return {"raw_prompt": [{"role": "user", "content": content}], "images": images}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(**given: Any) -> dict[str, Any]:
    return {"type": "image", **given}


def url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


@pytest.mark.parametrize(
    "row",
    [
        lambda a, b, at: asks("<image>and <image>?", images=[{"bytes": a, "path": None}, {"bytes": b}]),
        lambda a, b, at: asks(image(), text("and "), image(), text("?"), images=[a, url(b)]),
        lambda a, b, at: asks(image(image=a), text("and "), image(image=str(at)), text("?")),
        lambda a, b, at: asks(
            {"type": "image_url", "image_url": {"url": url(a)}}, text("and "), image(path=f"file://{at}"), text("?")
        ),
    ],
    ids=["marks", "parts", "own", "urls"],
)
def test_each_image_is_as_many_placeholders_as_it_takes(
    renderer: ImageRenderer, chat: ChatTokenizer, tmp_path: Path, row: Any
) -> None:
    black, white = png(0), png(255)
    (tmp_path / "white.png").write_bytes(white)
    prompt = renderer.render(row(black, white, tmp_path / "white.png"))
    marks = "<image>" * TOKENS
    assert chat.decode(prompt.ids) == f"<|im_start|>user\n{marks}and {marks}?<|im_end|>\n<|im_start|>assistant\n"
    pixels = prompt.multi_modal_inputs["pixel_values"]
    assert pixels.shape == (2, 3, SIDE, SIDE)
    assert pixels[0].max() < pixels[1].min()
    assert prompt.images == [black, white]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (asks(image(), image(), images=[b"one"]), "have 2 images .*, the row has 1"),
        (asks(image(image="https://example.org/a.png")), "image 1 is a URL, and nothing is downloaded"),
        (asks(image(image=3)), "image 1 is a int"),
        (asks(image(image=b"png"), {"type": "video"}), "message 1 has videos among its parts"),
        (asks(image(image=b"none")), "image 1: 4 bytes that are no readable image"),
        (asks(image(path="nowhere.png")), "image 1: nowhere.png cannot be read: No such file"),
        (asks(image(image="data:image/png;base64,?")), "image 1: its data: URL is not base64"),
    ],
)
def test_an_image_that_cannot_be_had_says_why(renderer: ImageRenderer, row: dict[str, Any], says: str) -> None:
    with pytest.raises(RenderingError, match=says):
        renderer.render(row)


def test_images_beside_a_text_are_the_agents_own() -> None:
    assert not media_shown(asks("look at it", images=[b"an image"]))
    assert not media_shown(asks("what is <image> in HTML?"))
    assert media_shown(asks(text("look"), image(), {"type": "input_audio"})) == {"image", "audio"}


def test_a_processor_that_is_none_is_named(tmp_path: Path, chat: ChatTokenizer) -> None:
    pytest.importorskip("PIL")
    assert not has_processor(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    assert has_processor(tmp_path)
    with pytest.raises(RenderingError, match=f"the processor of {tmp_path} cannot be loaded"):
        ImageRenderer(tmp_path, chat).render(asks(image(image=png(0))))


def test_the_sessions_of_a_group_share_what_was_made_of_their_images(renderer: ImageRenderer) -> None:
    first, again = (renderer.render(asks("<image>?", images=[png(77)])) for _ in range(2))
    assert again is first
    other, longer = (
        renderer.render(asks("<image>?", images=[png(78)])),
        renderer.render(asks("<image>??", images=[png(77)])),
    )
    assert (other.multi_modal_inputs["pixel_values"] != first.multi_modal_inputs["pixel_values"]).any()
    assert longer.ids != first.ids


@pytest.mark.parametrize("agent", ["single_turn_agent", "tool_agent"])
def test_the_tensors_arrive_in_the_queue_and_the_images_at_the_server(
    model: Path, chat: ChatTokenizer, agent: str
) -> None:
    async def main() -> None:
        server = FakeServer(says("= 391"))
        async with farm(server=server) as f:
            await f.admit(["seen"], agent_name=agent, **asks("<image>17 * 23 = ?", images=[png(9)]))
            await f.admit(["told"], agent_name=agent)
            f.start(chat=chat, model_path=str(model))
            groups = await f.settled(2, wait=60)
            assert [group.state for group in groups.values()] == ["ready", "ready"]
            rows = await f.trainer.get("train", [row.key for row in groups["seen"].rows])
            for i in range(2):
                assert chat.decode(np.asarray(rows["prompts"][i]).tolist()).count("<image>") == TOKENS
                assert rows["multi_modal_inputs"][i]["pixel_values"].shape == (1, 3, SIDE, SIDE)
            assert sorted(len(images) for images in server.shown) == [0, 0, 1, 1]
            assert [png(9)] in server.shown
            told = await f.trainer.get("train", [row.key for row in groups["told"].rows])
            assert "multi_modal_inputs" not in set(told)

    asyncio.run(main())


def test_an_image_for_a_model_without_a_processor_fails_the_session_with_the_reason() -> None:
    async def main() -> None:
        async with farm("= 391") as f:
            await f.admit(["seen"], **asks(text("what is it?"), image(image=b"png")))
            f.start()
            group = (await f.settled(1, wait=60))["seen"]
            assert "message 1 has images among its parts; a prompt may have images, where the model" in group.reason

    asyncio.run(main())
