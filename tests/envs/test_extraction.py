from __future__ import annotations

import pytest

from rllib_llm.envs import EnvConfigError
from rllib_llm.envs.extraction import AnswerExtractor


@pytest.mark.parametrize(
    ("config", "text", "expected"),
    [
        ("marker", "a+1=3#3", "3"),
        ("marker", "#1 then # 22 \n", "22"),
        ("marker", "no answer", None),
        ("marker", "empty #  ", None),
        ({"kind": "marker", "marker": "####"}, "x # 1 #### 5", "5"),
        ({"kind": "marker", "until": "\n"}, "#5\nQ: next #7", "7"),
        ({"kind": "marker", "marker": "A:", "until": "\n"}, "A: 5\nmore", "5"),
        ("last_number", "it is 1,234.50 in all", "1234.50"),
        ("last_number", "7-3", "3"),
        ("last_number", "x = -3", "-3"),
        ("last_number", "(-3)", "-3"),
        ("last_number", "+4", "4"),
        ("last_number", "3/4 of it", "3/4"),
        ("last_number", "none", None),
        ("last_number", "", None),
        ({"kind": "last_number", "until": "\n"}, " 24\n\nQ: what is 3?", "24"),
        ({"kind": "last_number", "until": "\n"}, "\n\n24\nQ 3", "24"),
        ("tag", "<answer>1</answer><answer> 2 </answer>", "2"),
        ("tag", "<answer>1<answer>2</answer>", "2"),
        ("tag", "<answer>1", None),
        ({"kind": "tag", "tag": "final"}, "<final>a\nb</final>", "a\nb"),
        ("boxed", r"so \boxed{\frac{1}{2}} or \boxed{x_{1}}.", "x_{1}"),
        ("boxed", r"\boxed{1} and \boxed{2", "1"),
        ("boxed", "nothing", None),
        ("whole", "  all of it ", "all of it"),
        ("whole", "   ", None),
        ({"kind": "whole", "until": "\n"}, "\n first\nsecond", "first"),
        (None, "x", "x"),
    ],
)
def test_answer_is_found(config, text, expected):
    """Each kind reads what its documentation says, and the last occurrence wins."""
    assert AnswerExtractor.from_config(config)(text) == expected


def test_all_wrong_keys_are_reported_together():
    """One error names the unknown kind, the bad tag and the unknown key."""
    with pytest.raises(EnvConfigError) as error:
        AnswerExtractor.from_config({"kind": "regex", "tag": "<b>", "maker": "#"})
    for part in ("kind = 'regex'", "tag = '<b>'", "did you mean 'marker'"):
        assert part in str(error.value)


def test_key_without_effect_is_refused():
    """A marker given to a kind that ignores it is a mistake, not a no-op."""
    with pytest.raises(EnvConfigError, match="no effect with kind='last_number'"):
        AnswerExtractor.from_config({"kind": "last_number", "marker": "#"})
