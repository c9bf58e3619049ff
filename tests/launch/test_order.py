"""Where a config is pinned, the softmax overlaps the tensor cores in the machine code."""

import re

import pytest
from tests.launch import shipped
from tests.launch.versions import KNOWN_FAULTS, OTHERS, triton_folder

pytestmark = pytest.mark.timeout(2400)


def of_each_version(names):
    """Pairs of a version and one of these kernels that the quick pass compiles on it."""
    pairs = [
        (version, spec.name)
        for version in (shipped.OWN, *OTHERS)
        for spec, arch in shipped.pairs(version, full=False)
        if spec.name in names and arch == "sm_90"
    ]
    assert "3.6.0" not in OTHERS or {name for _, name in pairs} == set(names)
    return pytest.mark.parametrize(("version", "name"), pairs)


def compiled(results, version, name):
    if version != shipped.OWN and triton_folder(version) is None:
        pytest.skip(f"Triton {version} is not in .triton-versions; `make test` installs it")
    return results(version)[name, "sm_90"]


PINNED = {name for name, spec in shipped.SPECS.items() if spec.constexprs.get("PIN")}


@of_each_version(PINNED)
def test_exponentials_run_before_the_wait_for_pv(shipped_results, version, name):
    """In every step: wait for Q K^T (1 in flight), all exponentials, the pin, wait for P V (0)."""
    if KNOWN_FAULTS.get((version, name)) == "C7513":
        pytest.skip("ptxas serialises this kernel's wgmma on this release; test_shipped expects it")
    wanted = r"(DEPBAR\.LE gsb0, 0x[01]|MUFU\.EX2|BAR\.ARV 0xf)"
    order = re.findall(wanted, compiled(shipped_results, version, name).sass)
    steps = [i for i, text in enumerate(order) if text.endswith("0x1")]
    assert len(steps) >= 2, "each consumer has at least one loop"
    for i in steps:
        rest = order[i + 1 :]
        count = next(n for n, text in enumerate(rest) if text != "MUFU.EX2")
        assert count >= 32, f"{count} exponentials between the two waits"
        assert rest[count : count + 2] == ["BAR.ARV 0xf", "DEPBAR.LE gsb0, 0x0"]


GLUON = {n for n, spec in shipped.SPECS.items() if spec.gluon and shipped.is_quick(n)}
# `device/barriers.py` and `device/order.py`: slots, cleared V, turns of up to three consumers, pin.
OURS = set(range(8, 16))


@of_each_version(GLUON)
def test_named_barriers_do_not_collide_with_tritons(shipped_results, version, name):
    """Triton keeps to ids below 8, and attention's are there, for the threads of two warpgroups.

    The gradient of a shared bias has none; CTAs of a cluster meet by the cluster's barrier.
    """
    ptx = compiled(shipped_results, version, name).ptx
    used = re.findall(r"\bbar(?:rier)?(?:\.\w+)*\s+(\d+)(?:,\s*(\d+))?", ptx)
    ids = {int(ident) for ident, _ in used}
    assert {ident for ident in ids if ident >= 8} <= OURS
    if "_cluster[" in name:
        assert not ids  # its warps show each other numbers, and wait for them at mbarriers
        assert "barrier.cluster.wait" in ptx
        return
    if name.startswith("norm") or "_bwd_192:" in shipped.SPECS[name].function:
        assert max(ids) < 8  # one partition, whose threads meet by Triton's barrier alone
        return
    if "_fwd_" in name:
        constexprs = shipped.SPECS[name].constexprs
        assert {("13", "256"), ("14", "256")} <= set(used)  # the turns of the first two consumers
        slots = set(re.findall(r"\bbar\.(arrive|sync) %r\d+, (\d+)", ptx))
        threads = str(128 * constexprs["CONSUMERS"] + 32)
        named = constexprs["STAGES"] == 2
        assert slots == ({("arrive", threads), ("sync", threads)} if named else set())
    elif name.startswith("attention_dbias"):
        assert max(ids) < 8  # each consumer waits for the producer alone, at mbarriers
    elif name.startswith("attention"):
        assert ("8", "256") in used
    else:
        assert max(ids) < 8  # the product orders its warpgroups by mbarriers alone
    assert any(ident < 8 for ident in ids)
    # A slot goes back by each thread; where the last columns are 64 or more by one of a warpgroup.
    by_one = shipped.SPECS[name].constexprs.get("TAIL", 0) >= 64
    assert ("cp.async.mbarrier.arrive.noinc" in ptx) != by_one
