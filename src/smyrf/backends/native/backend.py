"""The stages of the native backend."""

from smyrf.backends.native import extension
from smyrf.backends.native.extension import MISSING
from smyrf.grouping.stages import Backend

__all__ = ["MISSING", "NATIVE"]

NATIVE: Backend | None = None

if not MISSING:
    from smyrf.backends.native.attend import attend
    from smyrf.backends.native.hashing import sort_by_hash
    from smyrf.backends.native.prepare import prepare
    from smyrf.backends.native.selection import select_and_fold
    from smyrf.backends.native.tangent import attend_tangent
    from smyrf.backends.native.tree import build_tree

    NATIVE = Backend(
        name="native",
        runs_on=f"CPU; C++ for {extension.instruction_sets()[-1]}",
        prepare=prepare,
        sort_by_hash=sort_by_hash,
        build_tree=build_tree,
        select_and_fold=select_and_fold,
        attend=attend,
        attend_tangent=attend_tangent,
        borrowed={"sort_by_hash of ablations": "torch"},
    )
