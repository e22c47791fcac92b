"""Chat templates and conversations: the template's program is as untrusted as the messages."""

from __future__ import annotations

from random import Random
from typing import Any

from fuzz import mutation
from polyhead.checkpoints.tokenizers.chat_template import render_chat

TEMPLATES = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}",
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system = messages[0]['content'] | trim %}{% else %}{% set loop_messages = messages %}"
    "{% endif %}{% for m in loop_messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '[INST] ' ~ m.content|trim }}"
    "{% endfor %}",
    "{%- macro show(items, depth=0) -%}{%- for key, value in items.items() -%}"
    "{%- if value is mapping -%}{{ show(value, depth + 1) }}{%- elif value is string -%}"
    "{{ (key ~ ': ' ~ value)|indent(2) }}{%- else -%}{{ value|tojson(indent=2) }}{%- endif -%}"
    "{%- endfor -%}{%- endmacro -%}{%- set ns = namespace(n=0, all=[]) -%}"
    "{%- for m in messages|selectattr('role', 'equalto', 'user') -%}{%- set ns.n = ns.n + 1 -%}"
    "{%- set ns.all = ns.all + [m] -%}{{ show(m) }}{%- endfor -%}"
    "{{ ns.all|map(attribute='content')|join(', ')|upper|replace('\n', ' ') }}"
    "{{ '%s of %d'|format(ns.n, messages|length) }}{{ strftime_now('%Y') }}",
)
WORDS = (
    *("{% for i in range(99999) %}", "{% endfor %}", "{% if ", " %}", "{% endif %}", "{{ ", " }}"),
    *("{% set ns.s = ns.s + ns.s %}", "{% set ns.s = [ns.s, ns.s] %}", "{% macro m(x) %}", "m(m)"),
    *("{% endmacro %}", "{% set ns = namespace(s='xx') %}", "{% call m(1) %}", "{% endcall %}"),
    *("{% generation %}", "{% break %}", "{% continue %}", " recursive", "loop(messages)", "loop"),
    *("|center(", "|join(", "|map('", "|tojson", "|list", "|replace('', 'xxxxxxxx')", "|format(3)"),
    *(
        "|batch(3)",
        "|sum(start=[])",
        "|sort",
        "|groupby('role')",
        "|unique",
        "|attr('x')",
        "|round(",
    ),
    *(" * 99999", " ** 99", " ~ ", " + ", " % ", " // 0", "[::-1]", "[:]", "(", ")", "9" * 5_000),
    *(".__class__", ".format(", ".ljust(99999999)", ".items()", ".to_bytes(10**9)", "'%9999999d'"),
    *("{% include 'x' %}", "{% extends messages %}", "{% block b %}", "{% endblock %}", "self.b()"),
    *(
        "((((((((((((((((((((",
        "[[[[[[[[[[",
        "not " * 500,
        "1+" * 500,
        " if x else ",
        " is ",
        " in ",
    ),
    *(
        "{% filter upper %}",
        "{% endfilter %}",
        "messages",
        "cycler(1)",
        "joiner()",
        "dict(a=messages)",
    ),
)


def case(random: Random) -> None:
    template = random.choice(TEMPLATES)
    if random.random() < 0.9:
        template = mutation.text(random, template, WORDS)
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Why is 2 + 2 = 4?", "tools": {"a": {"b": [1, None]}}},
        {"role": "assistant", "content": "<think>hm</think> Because."},
        {"role": "user", "content": "x" * random.choice((1, 1_000, 50_000))},
    ]
    if random.random() < 0.3:
        messages = mutation.json_object(random, {"messages": messages}).get("messages", [])
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            messages = []
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    found = render_chat(template, messages, tokens, add_generation_prompt=random.random() < 0.5)
    assert isinstance(found, str)
