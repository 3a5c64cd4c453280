import json
from collections import Counter

import pytest
import torch

from smyrf.call import Call, Reason, why_dense
from smyrf.methods import Dense, PerHead, Smyrf, Tangent

METHOD = Tangent(48)


def call(n=300, m=300, **options):
    return Call(torch.empty(2, 4, n, 8), torch.empty(2, 2, m, 8), torch.empty(2, 2, m, 6), 0.5, **options)


def test_a_reason_is_its_sentence():
    counted = Counter([Reason.ONE_QUERY])
    assert counted["one query"] == 1
    assert counted == {"one query": 1}
    assert f"{Reason.ONE_QUERY}" == str(Reason.ONE_QUERY) == "one query"
    assert json.loads(json.dumps(Reason.ONE_QUERY)) == Reason.ONE_QUERY
    assert len({reason.value for reason in Reason}) == len(Reason)


@pytest.mark.parametrize(
    ("given", "method", "reason"),
    [
        (call(), METHOD, None),
        (call(is_causal=True), METHOD, None),
        (call(), PerHead((METHOD, Dense(), METHOD, Dense())), None),
        (call(), None, None),
        (call(n=1), METHOD, Reason.ONE_QUERY),
        (call(n=1), None, Reason.ONE_QUERY),
        (call(m=199), METHOD, Reason.FEW_KEYS),
        (call(), Dense(), Reason.EXACT),
        (call(), Smyrf(2, 300), Reason.EXACT),
        (call(n=250, m=250, is_causal=True), METHOD, Reason.EXACT),
        (call(n=250, m=250), METHOD, None),
        (call(n=1, only_dense=Reason.BIAS), METHOD, Reason.BIAS),
    ],
)
def test_why_a_call_is_dense(given, method, reason):
    assert why_dense(given, method, min_keys=200) is reason


def test_a_named_backend_serves_exact_calls_but_not_those_that_no_method_can():
    assert why_dense(call(), Dense(), backend="torch") is None
    assert why_dense(call(n=1), Dense(), backend="torch") is Reason.ONE_QUERY
    assert why_dense(call(only_dense=Reason.OTHER_MASK), METHOD, backend="torch") is Reason.OTHER_MASK
