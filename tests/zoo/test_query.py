import pytest

from memfit.errors import SpecError
from memfit.zoo.query import check_for, parse_query


def test_values_are_read_as_the_first_type_that_fits():
    options = parse_query("layers=6&dropout=0.1&rate=1e-3&tied=false&bias=True&name=gelu&low=-1")
    assert options == {
        "layers": 6,
        "dropout": 0.1,
        "rate": 0.001,
        "tied": False,
        "bias": True,
        "name": "gelu",
        "low": -1,
    }
    assert type(options["tied"]) is bool
    assert parse_query("") == {}


@pytest.mark.parametrize("text", ["layers", "layers=", "=3", "layers=3&width"])
def test_a_part_that_is_not_key_value_is_refused(text):
    with pytest.raises(SpecError, match="key=value"):
        parse_query(text)


def test_a_repeated_key_is_refused():
    with pytest.raises(SpecError, match="'layers' is given twice"):
        parse_query("layers=3&layers=4")


def maker(request, *, layers: int = 3, hidden: int = 0, dropout: float = 0.1, tied: bool = True): ...


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("layer=3", "unknown option of it 'layer'; did you mean layers"),
        ("zzz=3", "known: dropout, hidden, layers, tied"),
        ("request=3", "unknown option"),
        ("layers=two", "takes a whole number"),
        ("layers=2.5", "takes a whole number"),
        ("layers=true", "takes a whole number"),
        ("tied=1", "takes true or false"),
        ("dropout=high", "takes a number"),
        ("layers=0", "at least 1"),
        ("hidden=-1", "at least 0"),
    ],
)
def test_options_are_checked_by_name_type_and_range(query, message):
    with pytest.raises(SpecError, match=message):
        check_for(maker, "it", parse_query(query))


def test_a_whole_number_stands_for_a_float():
    check_for(maker, "it", parse_query("dropout=0&hidden=0&layers=1"))
