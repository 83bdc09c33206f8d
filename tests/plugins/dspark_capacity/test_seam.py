# SPDX-License-Identifier: Apache-2.0
"""The seam mechanism on made-up modules: verify all rows, then all or none."""

import sys
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.plugins.dspark_capacity import seam as seam_module
from vllm.plugins.dspark_capacity.seam import (
    TABLE_FILE,
    Scope,
    Seam,
    SeamError,
    applied_ids,
    apply,
    original_of,
    remove,
    signature_of,
    verify,
)

VERSION = "9.9.9"
UPSTREAM, IMPORTER, OURS = "seam_upstream", "seam_importer", "seam_ours"
SOURCES = {
    UPSTREAM: """
class Base:
    def inherited(self, a):
        return "upstream"

class Engine(Base):
    option: int = 0

    def __init__(self, model, *, device=None):
        pass

    def step(self, batch):
        return "upstream"

    @staticmethod
    def helper(x):
        return "upstream"

    @classmethod
    def make(cls, y):
        return cls.__name__, "upstream"

def factory(a, b=1):
    return "upstream"

class Frozen(type):
    def __setattr__(cls, name, value):
        raise AttributeError(name)

class Closed(metaclass=Frozen):
    limit = 3
""",
    IMPORTER: "from seam_upstream import factory\n",
    OURS: """
import functools
import seam_upstream

NUMBER = 7

class Engine(seam_upstream.Engine):
    pass

def factory(a, b=1):
    return "ours"

def wrap(original):
    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return "ours", original(*args, **kwargs)
    return wrapped
""",
}


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Give every test fresh modules and an empty installation record."""
    monkeypatch.setattr(seam_module, "_applied", {})
    loaded = {}
    for name, source in SOURCES.items():
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, module.__dict__)
        loaded[name] = module
    return hold(*(loaded[name] for name in SOURCES))


def hold(upstream, importer, ours):
    """Return the modules and, in case they get replaced, their present classes."""
    classes = [c for c in vars(upstream).values() if isinstance(c, type)]
    return types.SimpleNamespace(
        upstream=upstream,
        importer=importer,
        ours=ours,
        classes=classes,
        annotations=upstream.Engine.__annotations__,
    )


def row(name, target, replacement="wrap", **changes):
    fields = {
        "id": name,
        "target": target if ":" in target else f"{UPSTREAM}:{target}",
        "kind": "wrap" if replacement == "wrap" else "rebind",
        "scope": Scope.WORKER,
        "replacement": (replacement if ":" in replacement else f"{OURS}:{replacement}"),
        "parameters": None,
        "reason": "no hook",
        "remove_when": "there is a hook",
        "test": "tests/test_x.py::test_y",
    }
    return Seam(**{**fields, **changes})


FACTORY = row("a.factory", "factory", "factory", parameters=("a", "b"))
STEP = row("a.step", "Engine.step", parameters=("self", "batch"))
GOOD_ROWS = (
    FACTORY,
    STEP,
    row("a.inherited", "Engine.inherited"),
    row("a.class", "Engine", "Engine", parameters=("model", "device")),
    row("a.item", "Base.inherited"),
    row("a.annotation", "Engine.__annotations__[option]", "NUMBER"),
)
# Every way in which a row may fail to fit, and what the error has to say.
BAD_ROWS = {
    "module": (row("b.module", "seam_no_such:x"), "seam_no_such"),
    "class": (row("b.class", "Gone.step"), "no attribute 'Gone'"),
    "attribute": (row("b.attribute", "Engine.gone"), "no attribute 'gone'"),
    "item": (row("b.item", "Engine.__annotations__[gone]"), "no attribute 'gone'"),
    "signature": (
        row("b.signature", "factory", "factory", parameters=("a", "c")),
        "('a', 'b')",
    ),
    "constructor": (
        row("b.constructor", "Engine", "Engine", parameters=("model",)),
        "('model', 'device')",
    ),
    "not-callable": (
        row("b.not-callable", "Closed.limit", "NUMBER", parameters=("a",)),
        "not a callable",
    ),
    "importer": (
        row("b.importer", "Engine", "Engine", importers=(IMPORTER,)),
        f"{IMPORTER}.Engine",
    ),
    "importer-module": (
        row("b.importer-module", "factory", "factory", importers=("seam_no_such",)),
        "seam_no_such",
    ),
}


def snapshot(modules):
    """Return every object that a row could have replaced."""
    return (
        [
            {name: v for name, v in vars(m).items() if name != "__builtins__"}
            for m in (modules.upstream, modules.importer)
        ],
        [dict(vars(c)) for c in modules.classes],
        dict(modules.annotations),
    )


@pytest.mark.parametrize("case", BAD_ROWS)
def test_row_that_does_not_fit_names_seam_expected_found_and_file(case):
    bad, found = BAD_ROWS[case]
    with pytest.raises(SeamError) as error:
        apply([bad], VERSION)
    text = str(error.value)
    assert f"seam '{bad.id}'" in text
    assert "expected " in text
    assert found in text
    assert f"row '{bad.id}' in {TABLE_FILE}" in text


@pytest.mark.parametrize("case", BAD_ROWS)
def test_nothing_is_set_unless_every_row_was_verified(case, modules):
    before = snapshot(modules)
    with pytest.raises(SeamError):
        apply([*GOOD_ROWS, BAD_ROWS[case][0]], VERSION)
    assert snapshot(modules) == before
    assert applied_ids() == ()
    assert apply(GOOD_ROWS, VERSION), "premise: the other rows fit"


def test_failure_while_setting_restores_what_was_set(modules):
    before = snapshot(modules)
    unsettable = row("z.closed", "Closed.limit", "NUMBER")
    with pytest.raises(AttributeError, match="limit"):
        apply([*GOOD_ROWS, unsettable], VERSION)
    assert snapshot(modules) == before
    assert applied_ids() == ()


def test_failing_replacement_leaves_everything_alone(modules):
    before = snapshot(modules)
    with pytest.raises(AttributeError, match="no_such"):
        apply([*GOOD_ROWS, row("z.ours", "Engine.helper", "no_such")], VERSION)
    assert snapshot(modules) == before
    assert applied_ids() == ()


def test_second_install_is_a_no_op(modules):
    assert apply(GOOD_ROWS, VERSION) == tuple(s.id for s in GOOD_ROWS)
    first = snapshot(modules)
    assert apply(GOOD_ROWS, VERSION) == ()
    assert snapshot(modules) == first
    # A wrap would wrap its own wrapper.
    assert modules.upstream.Base().inherited(1) == ("ours", "upstream")


def test_install_completes_a_partial_one():
    apply([STEP], VERSION)
    assert apply([FACTORY, STEP], VERSION) == (FACTORY.id,)
    assert applied_ids() == (STEP.id, FACTORY.id)


def test_object_replaced_by_somebody_else_since_is_an_error(modules):
    apply([FACTORY], VERSION)
    modules.upstream.factory = lambda a, b=1: "theirs"
    with pytest.raises(SeamError, match="replaced since"):
        apply([FACTORY], VERSION)


def test_remove_restores_and_forgets_unknown_ids(modules):
    before = snapshot(modules)
    apply(GOOD_ROWS, VERSION)
    assert snapshot(modules) != before
    remove(["never.applied", *(s.id for s in GOOD_ROWS)])
    assert snapshot(modules) == before
    assert applied_ids() == ()


def test_restored_inheritance_follows_the_base_class(modules):
    apply([row("a.inherited", "Engine.inherited")], VERSION)
    remove(["a.inherited"])
    modules.upstream.Base.inherited = lambda self, a: "changed"
    assert modules.upstream.Engine("m").inherited(1) == "changed"


def test_importers_are_rebound_with_the_target_and_restored(modules):
    bound = row("a.both", "factory", "factory", importers=(IMPORTER,))
    original = modules.upstream.factory
    assert modules.importer.factory is original, "premise: bound at import"
    apply([bound], VERSION)
    assert modules.upstream.factory is modules.ours.factory
    assert modules.importer.factory is modules.ours.factory
    remove([bound.id])
    assert modules.upstream.factory is modules.importer.factory is original


def test_importer_that_no_longer_holds_the_object_is_an_error(modules):
    bound = row("a.both", "factory", "factory", importers=(IMPORTER,))
    verify([bound], VERSION)
    modules.importer.factory = lambda: None
    with pytest.raises(SeamError, match=f"{IMPORTER}.factory"):
        verify([bound], VERSION)
    del modules.importer.factory
    with pytest.raises(SeamError, match="nothing"):
        verify([bound], VERSION)


def test_wrap_keeps_the_kind_of_method(modules):
    apply(
        [
            row("a.static", "Engine.helper", parameters=("x",)),
            row("a.class", "Engine.make", parameters=("y",)),
            STEP,
        ],
        VERSION,
    )
    engine = modules.upstream.Engine
    assert engine.helper(1) == engine("m").helper(1) == ("ours", "upstream")
    # The wrapper gets the class that the call was made on.
    assert engine.make(1) == ("ours", ("Engine", "upstream"))
    assert engine("m").step(1) == ("ours", "upstream")


def test_replacement_is_imported_only_when_applied():
    lazy = row("a.lazy", "factory", "seam_lazy:factory")
    assert "seam_lazy" not in sys.modules
    assert verify([lazy], VERSION)
    assert "seam_lazy" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="seam_lazy"):
        apply([lazy], VERSION)


def test_verify_changes_nothing(modules):
    before = snapshot(modules)
    pending = verify(GOOD_ROWS, VERSION)
    assert [s for s, _ in pending] == list(GOOD_ROWS)
    assert snapshot(modules) == before
    assert applied_ids() == ()


def test_original_of_is_the_object_that_was_replaced(modules):
    original = modules.upstream.Base.inherited
    apply(GOOD_ROWS, VERSION)
    assert original_of("a.item") is original
    assert original_of("a.inherited") is original
    with pytest.raises(KeyError):
        original_of("never.applied")


def test_signature_depends_on_the_version_where_the_row_says_so():
    varying = row(
        "a.varying",
        "factory",
        "factory",
        parameters={VERSION: ("a", "b"), "1.0.0": ("a",)},
    )
    assert verify([varying], VERSION)
    with pytest.raises(SeamError, match="parameters"):
        verify([varying], "1.0.0")


def test_signature_of_every_kind_of_callable(modules):
    engine = modules.upstream.Engine
    assert signature_of(engine) == ("model", "device")
    assert signature_of(vars(engine)["step"]) == ("self", "batch")
    assert signature_of(vars(engine)["helper"]) == ("x",)
    assert signature_of(vars(engine)["make"]) == ("y",)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_installs_and_removals_ends_where_it_began(data):
    # An example that Hypothesis breaks off leaves rows behind.
    remove(applied_ids())
    held = hold(*(sys.modules[name] for name in SOURCES))
    before = snapshot(held)
    # Rows with targets of their own: only such rows may be removed in any order.
    rows = [s for s in GOOD_ROWS if s.id not in ("a.class", "a.inherited")]
    for _ in range(data.draw(st.integers(0, 6))):
        chosen = data.draw(st.lists(st.sampled_from(rows), unique=True))
        if data.draw(st.booleans()):
            new = [s.id for s in chosen if s.id not in applied_ids()]
            assert apply(chosen, VERSION) == tuple(new)
        else:
            remove([s.id for s in chosen])
            assert not {s.id for s in chosen} & set(applied_ids())
    remove(applied_ids())
    assert snapshot(held) == before
