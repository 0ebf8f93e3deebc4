"""docs/models.md lists the families that there are."""

import re
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from precision_policies.models import FAMILIES

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_table_of_families_is_the_code():
    """Every family with transformers' class, and whether it is trained."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (yes|planned only) \|$", DOCS.read_text(), re.MULTILINE)
    expected = [
        (kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], "yes" if family.causal_lm else "planned only")
        for kind, family in FAMILIES.items()
    ]
    assert rows == expected
    assert all(
        family.causal_lm in ("", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]) for kind, family in FAMILIES.items()
    )
