"""References are checked without importing and resolved with a hint; `closest` gives the hint."""

import pickle
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfsdp.basics.references import check_reference, resolve_reference
from mmfsdp.errors import ConfigError, MmfsdpError, PolicyNotFoundError, closest


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("collections:OrderedDict", "OrderedDict"),
        ("collections.OrderedDict", "OrderedDict"),
        ("os.path:join", "join"),
        ("collections:OrderedDict.fromkeys", "fromkeys"),
    ],
)
def test_resolves(text: str, name: str) -> None:
    assert check_reference(text) == text
    assert resolve_reference(text).__name__ == name


@pytest.mark.parametrize(
    "text", ["", "join", "os path:join", "os.path:", ":join", "os..path:join", "a:b:c", "1a:b", None, 3]
)
def test_refuses_what_is_no_reference(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_reference(text)
    assert str(caught.value) == (
        f"{text!r} is not a reference. Write 'package.module:attribute', for example "
        "'torch.distributed.fsdp.wrap:size_based_auto_wrap_policy'."
    )
    with pytest.raises(ConfigError):
        resolve_reference(text)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(PolicyNotFoundError) as caught:
        resolve_reference("no_such_package.wrap:policy")
    assert str(caught.value) == (
        "'no_such_package.wrap:policy' cannot be resolved: no module named 'no_such_package'. "
        "Install it, or correct the reference."
    )


def test_a_misspelt_attribute() -> None:
    with pytest.raises(PolicyNotFoundError) as caught:
        resolve_reference("collections:OrderdDict")
    assert str(caught.value) == (
        "'collections:OrderdDict' cannot be resolved: 'collections' has no attribute 'OrderdDict'. "
        "Did you mean 'OrderedDict' or 'UserDict' or 'defaultdict'?"
    )


def test_checking_imports_nothing() -> None:
    code = """
    import sys
    from mmfsdp.basics.references import check_reference
    check_reference("wave:open")
    assert "wave" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize(
    ("given_name", "accepted", "hint"),
    [
        ("blok", ["block", "head"], " Did you mean 'block'?"),
        ("BLOCK", ["Block"], " Did you mean 'Block'?"),
        ("bloc", ["block", "blocks"], " Did you mean 'block' or 'blocks'?"),
        ("zzz", ["block"], ""),
        ("block", [], ""),
        (3, ["block"], ""),
        (None, ["none"], " Did you mean 'none'?"),
    ],
)
def test_closest(given_name: object, accepted: list[str], hint: str) -> None:
    assert closest(given_name, accepted) == hint


@settings(deadline=None)
@given(st.text(min_size=1), st.lists(st.text()))
def test_closest_only_suggests_what_is_accepted(word: str, accepted: list[str]) -> None:
    assert repr(word) in closest(word, [*accepted, word]) or any(
        repr(name) in closest(word, [*accepted, word]) for name in accepted
    )


def test_errors_keep_their_context_between_processes() -> None:
    error = PolicyNotFoundError("No.", config="wrap", fqn=None, rank=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is PolicyNotFoundError
    assert isinstance(again, MmfsdpError)
    assert str(again) == str(error) == "No. [config='wrap', rank=3]"
    assert again.context == {"config": "wrap", "rank": 3}
