"""The tokenizer of the example: bytes, plus one token for each text that every conversation repeats.

    <|im_start|>user\n 17 * 23 = ? <|im_end|> <|im_start|>assistant\n
    <tool_call>{"name": "calculator", "arguments": {"expr": " 17*23 "}}</tool_call> <|im_end|>
    <|im_start|>tool\n 391 <|im_end|> <|im_start|>assistant\n = 391 <|im_end|>

Role headers and the two halves of a tool call are single tokens; everything else is one token per byte. Any text
decodes to itself, and a conversation of three turns takes 40 tokens instead of 180.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|endoftext|>", "<|im_end|>"
SPECIAL = (PAD, "<|im_start|>", END, *(f"<|im_start|>{role}\n" for role in ("system", "user", "assistant", "tool")))

CALL_BEGIN = '<tool_call>{"name": "calculator", "arguments": {"expr": "'
CALL_END = '"}}</tool_call>'

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] if call['function'] is defined else call -%}
{{- '<tool_call>{"name": ' + function['name'] | tojson -}}
{{- ', "arguments": ' + function['arguments'] | tojson + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}"""
"""ChatML without the line break between turns: it would cost two tokens in each conversation and say nothing."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in (CALL_BEGIN, CALL_END)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
