"""Imports point one way, and importing part of the package brings in no more than it needs."""

import ast
import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import smyrf
from smyrf.methods import parse_method

SOURCE = Path(smyrf.__file__).parent
# A module imports from its own layer and from layers above it in this list.
LAYERS = (
    {"methods"},
    {"call", "seeds", "atomic_write"},
    {"grouping"},
    {"backends"},
    {"attention"},
    {"nn"},
    {"models"},
    {"tuning"},
    {"tools"},
    {"experiments"},
    {"__main__"},
)
# Inside `backends`: what each part imports besides itself. No backend imports another, but for native.
SHARED = {"dense", "dropout", "forward_mode", "operators"}
EVERY = {*SHARED, "reference", "torch", "native"}
BACKENDS = dict.fromkeys(SHARED, SHARED) | {
    "reference": SHARED,
    "torch": SHARED,
    "native": SHARED | {"torch"},
    "registry": EVERY,
    "__init__": EVERY | {"registry"},
}
# Imports that point back: the importing module, the imported module or name.
KNOWN: set[tuple[str, str]] = set()


def rank(part):
    """The number of the layer to which a part of the package belongs."""
    found = [number for number, layer in enumerate(LAYERS) if part in layer]
    assert found, f"{part} belongs to no layer"
    return found[0]


def dotted(path, root):
    """Parts of the dotted name of a file, ``__init__`` included."""
    return [root.name, *path.relative_to(root).with_suffix("").parts]


def imports(path, root, public):
    """Dotted names that a file imports from the package, wherever: in functions and under TYPE_CHECKING too.

    `public` says where the names that the package itself offers are defined. Using ``smyrf.name`` imports it.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = dotted(path, root)[: -node.level] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == root.name:
            names = [f"{root.name}.{node.attr}"]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == root.name and rest and not rest.startswith("_"):  # not its version, not the extension
                yield f"{public[rest]}.{rest}" if rest in public else name


def backwards(root, public):
    """All imports under a root that point back."""
    found = set()
    for path in sorted(root.rglob("*.py")):
        mine = dotted(path, root)
        if mine[1] == "__init__":  # lazy: it imports a name when that is asked for
            continue
        for name in imports(path, root, public):
            theirs = name.split(".")
            fine = rank(theirs[1]) <= rank(mine[1])
            if mine[1] == theirs[1] == "backends":
                other = theirs[2] if theirs[2] in BACKENDS else "registry"  # a name that the package re-exports
                fine = other in BACKENDS[mine[2]] | {mine[2]}
            if not fine:
                found.add((".".join(mine).removesuffix(".__init__"), name))
    return found


def test_imports_point_one_way():
    found = backwards(SOURCE, smyrf._SOURCES)
    assert found - KNOWN == set(), "these imports point back"
    assert KNOWN - found == set(), "these are mended: take them out of KNOWN"


TREE = {
    "__init__.py": "from smyrf.attention import attention",
    "methods/__init__.py": "from smyrf.methods.base import Method",
    "methods/base.py": "import math",
    "call.py": "from smyrf.methods import Method\nimport torch",
    "grouping/stages.py": "from ..call import Call\nfrom smyrf import Tangent",
    "backends/__init__.py": "from smyrf.backends.registry import BACKENDS",
    "backends/registry.py": "from smyrf.backends.native.backend import NATIVE\nfrom smyrf.backends.torch import attend",
    "backends/dense.py": "from smyrf.backends.dropout import keep",
    "backends/dropout.py": "",
    "backends/torch/attend.py": "from smyrf.backends.dropout import keep\nfrom smyrf.backends.torch import tree",
    "backends/torch/tree.py": "",
    "backends/native/backend.py": "from smyrf.backends.torch.attend import attend\nimport smyrf._native",
    "attention.py": "import smyrf\nprint(smyrf.__version__, smyrf.backends.BACKENDS)",
    "models/plan.py": "from smyrf import attention",
}


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("methods/base.py", "import smyrf.call", "smyrf.call"),
        ("methods/base.py", "def f():\n    from smyrf import call", "smyrf.call"),
        (
            "methods/base.py",
            "if TYPE_CHECKING:\n    from smyrf.grouping.stages import Tree",
            "smyrf.grouping.stages.Tree",
        ),
        ("methods/base.py", "from .. import call", "smyrf.call"),
        ("methods/__init__.py", "from ..call import Call", "smyrf.call.Call"),
        ("call.py", "from smyrf import attention", "smyrf.attention.attention"),
        ("grouping/stages.py", "import smyrf\nsmyrf.attention(1)", "smyrf.attention.attention"),
        ("grouping/stages.py", "from importlib import import_module\nimport_module('smyrf.nn')", "smyrf.nn"),
        ("attention.py", "from smyrf.models.plan import Plan", "smyrf.models.plan.Plan"),
        ("backends/torch/tree.py", "from smyrf.backends.native import backend", "smyrf.backends.native.backend"),
        ("backends/torch/tree.py", "from smyrf.backends.reference import tree", "smyrf.backends.reference.tree"),
        ("backends/torch/tree.py", "from smyrf.backends import BACKENDS", "smyrf.backends.BACKENDS"),
        ("backends/native/backend.py", "from ..reference import tree", "smyrf.backends.reference.tree"),
        ("backends/dropout.py", "from smyrf.backends.torch import tree", "smyrf.backends.torch.tree"),
    ],
)
def test_an_import_that_points_back_is_found(tmp_path, file, line, found):
    root = tmp_path / "smyrf"
    for name, code in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(code)
    public = {"attention": "smyrf.attention", "Tangent": "smyrf.methods", "backends": "smyrf.backends"}
    assert backwards(root, public) == set()
    (root / file).write_text(f"{TREE[file]}\n{line}")
    module = ".".join(["smyrf", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
    assert backwards(root, public) == {(module, found)}


# --- in a new process -----------------------------------------------------------------------------------


def run(code):
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["smyrf", "smyrf.methods"])
def test_methods_need_no_framework(module):
    heavy = ("torch", "numpy", "transformers", "diffusers", "matplotlib", "typer", "rich")
    assert run(f"import sys, {module}; print([x for x in {heavy} if x in sys.modules])") == "[]"


def test_attention_needs_torch_and_numpy_and_nothing_optional():
    code = """
import sys, torch, smyrf
x = torch.randn(1, 2, 300, 8)
for method in (smyrf.Smyrf(2, 32), smyrf.Tangent(64), smyrf.Dense()):
    smyrf.attention(x, x, x, method=method, is_causal=True)
smyrf.nn.SmyrfAttention(); smyrf.backends()
optional = ("transformers", "diffusers", "matplotlib", "typer", "rich", "plotly", "safetensors", "PIL", "scipy")
print([name for name in optional if name in sys.modules])
"""
    assert run(code) == "[]"


@pytest.mark.parametrize("first", ["import smyrf", "import smyrf.attention, smyrf.backends", "import smyrf.nn"])
def test_a_function_is_not_hidden_by_the_module_of_its_name(first):
    code = f"""
{first}
import smyrf, types
import smyrf.backends.registry, smyrf.attention
from smyrf.attention import serve
from smyrf.backends import find_backend
for name in ("attention", "backends"):
    assert isinstance(getattr(smyrf, name), types.FunctionType), name
assert "native" in smyrf.backends()
assert isinstance(smyrf.nn, types.ModuleType)
print("fine")
"""
    assert run(code) == "fine"


# --- the package's names --------------------------------------------------------------------------------


def test_dir_lists_the_public_names():
    assert set(smyrf.__all__) <= set(dir(smyrf))
    assert all(getattr(smyrf, name) is not None for name in smyrf.__all__)
    assert set(smyrf._SOURCES) | {"nn"} == set(smyrf.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'smyrf' has no attribute 'atention'"):
        smyrf.atention  # noqa: B018


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_methods_and_modules_can_be_copied(copied):
    for text in ("dense", "tangent:0.25,levels=2", "smyrf:8x32"):
        method = parse_method(text)
        assert copied(method) == method
    heads = smyrf.PerHead((smyrf.Dense(), smyrf.Tangent(64)))
    assert copied(heads) == heads
    x = torch.randn(2, 50, 16)
    layer = smyrf.nn.MultiheadAttention(16, 2, batch_first=True, method=smyrf.Smyrf(2, 16), seed=3, backend="torch")
    assert torch.equal(copied(layer)(x, x, x)[0], layer(x, x, x)[0])
    plain = smyrf.nn.SmyrfAttention(smyrf.Tangent(20), backend="reference")
    assert copied(plain).method == plain.method
    assert copied(plain).backend == "reference"


def test_subpackages_are_attributes_of_the_package():
    code = "import smyrf; print(smyrf.methods.Dense(), smyrf.models.__name__, smyrf.nn.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Dense() smyrf.models smyrf.nn\n"
