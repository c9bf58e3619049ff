"""Flags in global memory: loads that acquire, stores that release, and a wait that ends.

A flag is one 32-bit word that somebody else writes: a kernel, a copy engine, a peer, the host. The
order of memory is the system's (`.sys`), the widest there is. Data that a flag announces and that a
TMA load then reads goes through the async proxy, so a proxy fence stands between the two.
Source: PTX ISA 8.x, memory consistency model and `fence.proxy`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileloom.device.compat import thread_barrier

_SCOPES = ("cta", "cluster", "gpu", "sys")
_GPU = gl.constexpr("gpu")  # Triton 3.6 takes a default text only so


@gluon.constexpr_function
def _wait_ptx(test):
    return f"""
{{
.reg .pred p, q;
.reg .b32 v, r;
.reg .b64 t;
mov.b32 r, 1;
SPIN:
ld.acquire.sys.global.b32 v, [$1];
{test}
@p bra READY;
mov.u64 t, %globaltimer;
setp.gt.s64 q, t, $2;
@q bra LEAVE;
nanosleep.u32 32;
bra SPIN;
LEAVE:
mov.b32 r, 0;
READY:
fence.proxy.async;
mov.b32 $0, r;
}}
"""


@gluon.jit
def wait_flag(flag, epoch, deadline):
    """Spin until the word at `flag` has reached `epoch`, or the global timer has passed `deadline`.

    Args:
        flag: Pointer to a 32-bit word.
        epoch: int32; reached when `flag - epoch`, as a signed 32-bit difference, is 0 or more.
        deadline: int64 nanoseconds of `globaltimer`.

    Returns:
        1 when it was reached: what its writer wrote before is then visible to ordinary loads and,
        through the proxy fence, to TMA loads. 0 when the time ran out.
    """
    text: gl.constexpr = _wait_ptx("sub.s32 v, v, $3; setp.ge.s32 p, v, 0;")
    args = [flag.to(gl.int64), deadline, epoch]
    return gl.inline_asm_elementwise(text, "=r,l,l,r", args, gl.int32, False, 1)


@gluon.jit
def wait_flag_set(flag, deadline):
    """`wait_flag` for a word that is there as soon as it is not 0."""
    text: gl.constexpr = _wait_ptx("setp.ne.s32 p, v, 0;")
    return gl.inline_asm_elementwise(
        text, "=r,l,l", [flag.to(gl.int64), deadline], gl.int32, False, 1
    )


@gluon.constexpr_function
def _scoped(text, function, scope):
    if scope not in _SCOPES:
        raise ValueError(
            f"{function}: scope is {scope!r}; known: {', '.join(_SCOPES)}. Try: scope='gpu'."
        )
    return text.replace("SCOPE", scope)


@gluon.jit
def load_acquire(flag, scope: gl.constexpr = _GPU):
    """Load a 32-bit word; what its writer wrote before releasing it is visible afterwards.

    To ordinary loads, that is: before a TMA load of such data comes `fence_proxy_async("global")`.

    Args:
        flag: Pointer to the word, a scalar.
        scope: How far its writer may be: ``"cta"``, ``"cluster"``, ``"gpu"``, ``"sys"``.
    """
    text: gl.constexpr = _scoped(
        "ld.acquire.SCOPE.global.b32 $0, [$1];", "load_acquire", scope
    )  # fmt: skip
    return gl.inline_asm_elementwise(text, "=r,l", [flag.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def store_release(flag, value, scope: gl.constexpr = _GPU):
    """Store a 32-bit word that announces what was written before.

    By the whole partition: its threads meet first, so that the word stands for what each of them
    wrote. What TMA stores wrote counts after `tma_store_wait(0, read=False)`.

    Args:
        flag: Pointer to the word, a scalar.
        value: int32.
        scope: How far its reader may be: ``"cta"``, ``"cluster"``, ``"gpu"``, ``"sys"``.
    """
    text: gl.constexpr = _scoped(
        "st.release.SCOPE.global.b32 [$1], $2; mov.b32 $0, $2;", "store_release", scope
    )  # fmt: skip
    thread_barrier()
    gl.inline_asm_elementwise(text, "=r,l,r", [flag.to(gl.int64), value], gl.int32, False, 1)


@gluon.jit
def globaltimer():
    """Return the GPU's global timer: int64 nanoseconds."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], gl.int64, False, 1)
