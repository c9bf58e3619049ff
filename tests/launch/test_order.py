"""Where a config is pinned, the softmax overlaps the tensor cores in the machine code."""

import re

import pytest
from tests.launch import shipped

pytestmark = pytest.mark.timeout(2400)

PINNED = sorted(name for name, spec in shipped.SPECS.items() if spec.constexprs.get("PIN"))


@pytest.mark.parametrize("name", PINNED)
def test_exponentials_run_before_the_wait_for_pv(shipped_results, name):
    """In every step: wait for Q K^T (1 in flight), all exponentials, the pin, wait for P V (0)."""
    wanted = r"(DEPBAR\.LE gsb0, 0x[01]|MUFU\.EX2|BAR\.ARV 0xf)"
    order = re.findall(wanted, shipped_results(shipped.OWN)[name, "sm_90"].sass)
    steps = [i for i, text in enumerate(order) if text.endswith("0x1")]
    assert len(steps) >= 2, "each consumer has at least one loop"
    for i in steps:
        rest = order[i + 1 :]
        count = next(n for n, text in enumerate(rest) if text != "MUFU.EX2")
        assert count >= 32, f"{count} exponentials between the two waits"
        assert rest[count : count + 2] == ["BAR.ARV 0xf", "DEPBAR.LE gsb0, 0x0"]
