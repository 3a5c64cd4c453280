"""The stages of the torch backend."""

from smyrf.backends.torch.attend import attend
from smyrf.backends.torch.hashing import sort_by_hash
from smyrf.backends.torch.prepare import prepare
from smyrf.backends.torch.selection import select_and_fold
from smyrf.backends.torch.tree import build_tree
from smyrf.grouping.stages import Backend

TORCH = Backend(
    name="torch",
    runs_on="any device; PyTorch's operators",
    prepare=prepare,
    sort_by_hash=sort_by_hash,
    build_tree=build_tree,
    select_and_fold=select_and_fold,
    attend=attend,
)
