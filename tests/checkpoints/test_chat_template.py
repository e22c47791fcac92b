"""Chat templates run in a sandbox and fail in words."""

from __future__ import annotations

import pytest

from polyhead.checkpoints.chat_template import render_chat
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
