"""The stages of the reference backend."""

from smyrf.backends.reference.attend import attend
from smyrf.backends.reference.hashing import sort_by_hash
from smyrf.backends.reference.prepare import prepare
from smyrf.backends.reference.selection import select_and_fold
from smyrf.backends.reference.tree import build_tree
from smyrf.grouping.stages import Backend

REFERENCE = Backend(
    name="reference",
    runs_on="any device; slow, differentiable twice",
    prepare=prepare,
    sort_by_hash=sort_by_hash,
    build_tree=build_tree,
    select_and_fold=select_and_fold,
    attend=attend,
)
