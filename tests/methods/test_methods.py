import dataclasses
import json

import pytest

from smyrf import Dense, PerHead, Smyrf, Tangent
from smyrf.methods import method_from_dict, parse_method


def test_cost_measures_are_the_papers():
    # Table 1 of the paper: 32 rounds of 64 of 4096 queries is 50% of the memory.
    assert Smyrf(32, 64).memory_share(4096) == 0.5
    assert Smyrf(128, 4).memory_share(4096) == 0.125
    # BigGAN has 4096 queries and 1024 keys: 64 clusters of 64 queries and 16 keys.
    assert Smyrf(32, 64).key_visits(1024, n_queries=4096) == 32 * 16


def test_lengths_that_do_not_divide_round_the_keys_up():
    method = Smyrf(n_hashes=3, cluster_size=16)
    assert method.n_clusters(97, 113) == 7
    assert method.key_visits(113, n_queries=97) == 3 * 17


def test_one_cluster_costs_what_dense_costs():
    assert Smyrf(8, 512).key_visits(512) == Dense().key_visits(512) == 512


def test_there_are_never_more_clusters_than_keys():
    assert Smyrf(1, 4).n_clusters(1000, 5) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"n_hashes": 0}, ValueError, "n_hashes=0"),
        ({"cluster_size": -3}, ValueError, "cluster_size=-3"),
        ({"cluster_size": 2.5}, TypeError, "cluster_size=2.5"),
        ({"n_hashes": True}, TypeError, "n_hashes=True"),
        ({"transform": "F"}, ValueError, "transform='F' must be one of asymmetric"),
        ({"hashing": "sha1"}, ValueError, "hashing='sha1' must be one of projection"),
        ({"deduplicate": 1}, TypeError, "deduplicate=1"),
    ],
)
def test_bad_options_are_named_with_their_value(arguments, error, words):
    with pytest.raises(error, match=words):
        Smyrf(**arguments)


def test_methods_are_values():
    assert Smyrf(4, 64) == Smyrf(n_hashes=4, cluster_size=64)
    assert len({Smyrf(), Smyrf(), Dense()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Smyrf().n_hashes = 3


METHODS = [
    Dense(),
    Smyrf(3, 17, transform="xbox", deduplicate=True),
    Tangent(0.1),
    Tangent(97, levels=2, n_near=33),
    PerHead((Tangent(0.1), Dense(), Smyrf(2, 16))),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_method_survives_json(method):
    assert method_from_dict(json.loads(json.dumps(method.to_dict()))) == method


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "an object with a kind"),
        ({"budget": 0.1}, "an object with a kind"),
        ({"kind": "flash"}, "kind='flash' must be one of smyrf"),
        ({"kind": "dense", "budget": 0.1}, "dense has no option 'budget'; it has none"),
        ({"kind": "tangent", "budget": 2.0}, "tangent: budget=2.0"),
        ({"kind": "smyrf", "n_hashes": "8"}, "smyrf: n_hashes='8'"),
        ({"kind": "per_head", "methods": []}, "per_head: methods"),
        ({"kind": "per_head", "methods": [{"kind": "dense", "x": 1}]}, "dense has no option 'x'"),
        ({"kind": "per_head"}, "per_head: .*methods"),
    ],
)
def test_what_is_wrong_in_json_is_named(data, words):
    with pytest.raises(ValueError, match=words):
        method_from_dict(data)


def test_methods_of_heads_cost_what_they_cost_in_the_mean():
    method = PerHead((Tangent(64), Dense(), Tangent(64), Tangent(128)))
    assert method.key_visits(512) == (64 + 512 + 64 + 128) // 4
    assert method.groups() == {Tangent(64): [0, 2], Dense(): [1], Tangent(128): [3]}
    for bad in ([Dense()], (), (PerHead((Dense(),)),)):
        with pytest.raises(TypeError, match="methods"):
            PerHead(bad)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("dense", Dense()),
        ("tangent:0.25", Tangent(0.25)),
        ("tangent:1.0", Tangent(1.0)),
        ("tangent:128", Tangent(128)),
        ("tangent:.5,levels=2,n_near=33", Tangent(0.5, levels=2, n_near=33)),
        ("smyrf:8x32", Smyrf(8, 32)),
        ("smyrf:8×32,deduplicate=true,transform=xbox", Smyrf(8, 32, deduplicate=True, transform="xbox")),
    ],
)
def test_a_typed_method_is_the_one_that_is_meant(text, method):
    assert parse_method(text) == method


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is unknown"),
        ("tangnt:0.25", "'tangnt:0.25' is unknown"),
        ("per_head:2", "'per_head:2' is unknown"),
        ("dense:2", "dense takes no size"),
        ("tangent", "its size is missing"),
        ("smyrf:8", "its size is missing"),
        ("tangent:", "its size is missing"),
        ("tangent:nan", "'nan' is not a number"),
        ("tangent:2.0", "budget=2.0 must be in"),
        ("tangent:0", "budget=0 must be at least 1"),
        ("tangent:-0.5", "budget=-0.5 must be in"),
        ("smyrf:8x", "'' is not a number"),
        ("smyrf:8.0x32", "n_hashes=8.0 must be an int"),
        ("smyrf:0x32", "n_hashes=0 must be at least 1"),
        ("smyrf:3000000000x32", "n_hashes=3000000000 must be below 2³¹"),
        ("tangent:1" + 400 * "0", "budget=10²⁰ or more must be below 2³¹"),
        ("tangent:0.1,levels=32", "levels=32 must be at most 31"),
        ("tangent:0.25,levels", "'levels' is not option=value"),
        ("tangent:0.25,level=2", "tangent has no option 'level'; it has budget"),
        ("tangent:0.25,levels=two", "levels='two' must be an int"),
        ("tangent:0.25,budget=2", "'budget=2' is given twice"),
        ("smyrf:8x32,kind=dense", "'kind=dense' is given twice"),
        ("smyrf:8x32,deduplicate=1", "deduplicate=1 must be a bool"),
        ("smyrf:8x32,transform=F", "transform='F' must be one of"),
        ("smyrf:8x32,levels=2x", "'2x' is not a number"),
    ],
)
def test_a_typed_method_that_is_none_is_refused_with_the_reason_and_the_grammar(text, words):
    with pytest.raises(ValueError, match="is not a method") as error:
        parse_method(text)
    assert words in str(error.value)
    assert str(error.value).startswith(repr(text))
    assert "write dense, tangent:0.25 (share of the keys), tangent:128" in str(error.value)


def test_labels_name_sizes_and_options_that_differ_from_the_default():
    assert Smyrf(4, 32).label == "Smyrf 4×32"
    assert Smyrf(4, 32, transform="xbox", deduplicate=True).label == "Smyrf 4×32, xbox, pairs once"
    assert Smyrf(4, 32, transform="xbox", deduplicate=True).family == "Smyrf, xbox, pairs once"
    assert Dense().label == Dense().family == "Dense"
    assert Tangent(0.25, levels=2).label == "Tangent 25%, 2 levels"
