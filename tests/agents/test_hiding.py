"""Of a key nothing is shown, however the other side writes it."""

from __future__ import annotations

import base64
import json
import random
from urllib.parse import quote

import pytest

from agent_loop.llm.hiding import PART, Hiding

KEY = "sk-SECRET/of+ours=0123456789xyz"
hide = Hiding([KEY])


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "written",
    [
        KEY, KEY.upper(), json.dumps(KEY)[1:-1].replace("/", "\\/"), "".join(f"\\u{ord(each):04x}" for each in KEY),
        quote(KEY, safe=""), quote(quote(KEY, safe=""), safe=""), "".join(f"&#{ord(each)};" for each in KEY),
        b64(KEY), b64(f"Bearer {KEY}"), b64(f":{KEY}"), b64(f"ab{KEY}c").replace("+", "-").replace("/", "_"),
        KEY.encode().hex(), KEY.encode("utf-16").decode("latin-1"), KEY[:PART], KEY[-PART:], KEY[7 : 7 + PART],
    ],
)  # fmt: skip
def test_a_word_with_a_part_of_the_key_is_hidden_in_every_writing(written: str) -> None:
    assert hide(f'{{"error": "not {written}, sorry"}}') == '{"error": "not ***, sorry"}'


def test_it_is_hidden_before_the_text_is_cut() -> None:
    shown = hide("x " * 145 + KEY)
    assert shown == "x " * 145 + "***"
    assert len(hide("x " * 1000)) == 300


def test_what_is_not_of_the_key_stays_as_it_is_but_for_what_cannot_be_printed() -> None:
    assert hide(b"wrong model, 100% sure\x1b[31m\n\xff") == "wrong model, 100% sure[31m \N{REPLACEMENT CHARACTER}"
    assert Hiding()(KEY) == KEY


def test_no_part_of_a_random_key_is_shown_wherever_it_stands() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    letters = [chr(each) for each in range(33, 127)]
    for _ in range(50):
        key = "".join(rng.choices(letters, k=rng.randint(PART, 60)))
        around = ["".join(rng.choices(' abc"\\,', k=rng.randint(0, 320))) for _ in range(2)]
        shown = Hiding([key])(around[0] + key + around[1])
        parts = {key[at : at + PART] for at in range(len(key) - PART + 1)}
        assert not [part for part in parts if part in shown], (key, shown)
