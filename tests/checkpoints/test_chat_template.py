"""Chat templates run in a sandbox and fail in words."""

from __future__ import annotations

import json
import time

import pytest

from polyhead.checkpoints.tokenizers.chat_template import render_chat
from polyhead.errors import CheckpointError, InputError

USER = [{"role": "user", "content": "hi"}]


def test_template_sees_messages_and_special_tokens() -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
    assert render_chat(template, USER, {"bos_token": "<s>"}) == "<s>[user]hi"


def test_blocks_leave_no_blank_lines() -> None:
    template = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert render_chat(template, USER * 2, {}) == "hi\nhi\n"


def test_generation_tag_loop_controls_and_tojson_work() -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m.content|tojson }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    assert render_chat(template, [{"role": "user", "content": "<é>"}] * 2, {}) == '"<é>"'


def test_tools_are_told_to_the_template_as_they_are() -> None:
    template = "{% if tools %}{% for tool in tools %}{{ tool|tojson }}{% endfor %}{% endif %}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [1, None]}}}
    assert json.loads(render_chat(template, USER, {}, tools=[tool])) == tool
    assert render_chat(template, USER, {}) == render_chat(template, USER, {}, tools=[]) == ""
    with pytest.raises(InputError, match="tools must hold what JSON can"):
        render_chat(template, USER, {}, tools=[{"a": {1}}])


def test_a_null_counts_as_absent() -> None:
    template = "{{ messages[0].name is defined }}"
    assert render_chat(template, [{"role": "user", "content": "x", "name": None}], {}) == "False"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_escapes_from_the_sandbox_are_refused(template: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        render_chat(template, USER, {})


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", USER, {})


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        render_chat("{% for %}", USER, {})


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 'x'|center(10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (10**9, 3) }}",
        "{{ '%1000000000d'|format(3) }}",
        "{{ '{:>1000000000}'.format(3) }}",
        "{{ '{0[0]:{0[1]}}'.format([3, 10**9]) }}",
        "{{ (5).to_bytes(10**9, 'big') }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s=[0]) %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] %}"
        "{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[0], t=[0]) %}{% for i in range(40) %}"
        "{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
        "{% set s = 'x' * 99999 %}{{ s|replace('', s) }}",
        "{% set s = 'x' * 99999 %}{{ s.replace('', s) }}",
        "{% set s = 'x' * 99999 %}{{ s|join(s) }}",
        "{% set s = 'x' * 99999 %}{{ range(99999)|join(s) }}",
        "{% set s = ['x'] * 99999 %}{% for i in range(99999) %}{% set t = s[:] %}{% endfor %}",
        "{% set s = [[1]] * 99999 %}{{ s|sum(start=[]) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ ('\\t' * 99999).expandtabs(99999) }}",
        "{{ range(99999)|map('center', 99999)|list|length }}",
        "{{ messages|tojson(indent=10**9) }}",
        "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(60) }}",
        "{% for i in [[[1, 2]] * 99] recursive %}{% if i is iterable %}{% for j in range(9999) %}"
        "{{ loop(i) if j is undefined else '' }}{% endfor %}{% endif %}{{ loop([[i] * 99]) }}"
        "{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
        "{{ 9**9**9 }}",
        "{{ (2**60)**(2**60) }}",
    ],
)
def test_a_template_can_do_only_so_much(template: str) -> None:
    began = time.process_time()
    with pytest.raises(InputError, match=r"too much work|format string|adds numbers|Recursion"):
        render_chat(template, USER, {})
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "written", ["{{ ns }}", "{{ '%s' % ns }}", "{{ ns ~ '' }}", "{{ ns|string }}"]
)
def test_a_namespace_is_written_as_its_name(written: str) -> None:
    """What it holds has no price, since it may change: here 2¹² numbers in 12 lists."""
    held = "{% set ns = namespace(s=0) %}{% for i in range(12) %}{% set ns.s = [ns.s, ns.s] %}"
    assert render_chat(held + "{% endfor %}" + written, USER, {}) == "<Namespace>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails on these .*RecursionError"),
        ("{{ raise_exception('x\n' * 9999) }}", "refuses these messages: x x x"),
        ("{% include 'x' %}", "fails on these messages: no loader"),
        ("{{ lipsum(n=10**6) }}", "'lipsum' is undefined"),
        ("{{ messages[0].content / 0 }}", "fails on these messages"),
    ],
)
def test_whatever_a_template_raises_is_its_refusal(template: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        render_chat(template, USER, {})
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1" + "+1" * 5000 + " }}",
        "{% if x %}" * 200 + "{% endif %}" * 200,
        "".join(f"{{% for a{i} in x %}}" for i in range(30)) + "{% endfor %}" * 30,
        "{{ " + "9" * 5000 + " }}",
        "{% break %}",
        "x" * 200_001,
    ],
)
def test_templates_that_cannot_be_compiled_are_the_models_fault(template: str) -> None:
    with pytest.raises(CheckpointError, match="the model's chat template"):
        render_chat(template, USER, {})


def test_long_conversations_are_within_the_limits() -> None:
    template = (
        "{%- set ns = namespace(found=false) -%}{%- for m in messages -%}"
        "{%- set content = m.content|trim -%}{%- if '</think>' in content -%}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
        "{%- if loop.index0 > ns.found and messages|length > 2 -%}{{- '<|' + m.role + '|>' -}}"
        "{{- content ~ '\\n' -}}{%- endif -%}{{- m|tojson if loop.last -}}{%- endfor -%}"
    )
    messages = [{"role": "user", "content": "word " * 2_000 + "</think>"}] * 400
    assert len(render_chat(template, messages, {})) > 10_000
    short = [{"role": "user", "content": "hi"}] * 5_000
    assert render_chat(template, short, {}).count("<|user|>") == 4_999


@pytest.mark.parametrize("content", [object(), float, {1: object()}])
def test_messages_hold_what_json_can(content: object) -> None:
    with pytest.raises(InputError, match="messages must hold what JSON can"):
        render_chat("{{ messages }}", [{"role": "user", "content": content}], {})


def test_a_template_of_200_000_characters_is_the_longest() -> None:
    longest = "x" * 200_000
    assert render_chat(longest, USER, {}) == longest
    with pytest.raises(CheckpointError, match="has 200,001 characters, more than 200,000"):
        render_chat(longest + "x", USER, {})
