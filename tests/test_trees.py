"""Trees: every structure comes back as it was, every leaf has a name of its own, and no name leaves the directory."""

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxckpt
from jaxckpt import LeafMismatchError, RestoreOptions, SaveOptions, UnsupportedLeafError

ALONE = SaveOptions(pack_below_bytes=0)
alone_and_packed = pytest.mark.parametrize("options", [ALONE, None], ids=["alone", "packed"])


class Point(NamedTuple):
    x: Any
    y: Any


class Empty(NamedTuple):
    pass


def same(found: Any, expected: Any) -> bool:
    """Whether two trees are equal in structure, types and every bit; a namedtuple may be of another class."""
    if isinstance(expected, jax.Array) and jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
        return found.dtype == expected.dtype and same(jax.random.key_data(found), jax.random.key_data(expected))
    if isinstance(expected, jax.Array | np.ndarray | np.generic):
        return (
            isinstance(found, jax.Array) == isinstance(expected, jax.Array)
            and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and np.asarray(found).tobytes() == np.asarray(expected).tobytes()
        )
    if hasattr(expected, "_fields"):
        named = (type(found).__name__, found._fields) == (type(expected).__name__, expected._fields)
        return named and same(tuple(found), tuple(expected))
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        keys = {(type(key), key) for key in found} == {(type(key), key) for key in expected}
        return keys and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return repr(found) == repr(expected)


def assert_same_with_like(found: Any, expected: Any) -> None:
    """Equal, node by node of the very same types, and leaf by leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert all(map(same, jax.tree.leaves(found), jax.tree.leaves(expected)))


def names(path: Path) -> list[str]:
    return [leaf.name for leaf in jaxckpt.describe(path).leaves]


def files_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


# Structure, without like


@alone_and_packed
@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        [],
        (),
        Empty(),
        {"a": None, "b": [], "c": {}, "d": (), "e": Empty()},
        [None, None],
        ([1, (2, [3])], {"a": [{"b": (4,)}]}),
        Point(np.ones(2), Point(np.zeros(3), None)),
        {"none first": [None, 1], "none last": [1, None], "only none": [None]},
        [[[]], [[], [1]], 2],
        (np.float32(1),),
        [np.arange(3), jnp.arange(3), 3, "three", 3.0, 3j, True],
    ],
    ids=lambda tree: str(tree)[:30],
)
def test_a_tree_comes_back_as_it_was(tmp_path: Path, tree: Any, options: SaveOptions | None) -> None:
    jaxckpt.save(tmp_path / "c", tree, options=options)
    assert same(jaxckpt.restore(tmp_path / "c"), tree)
    assert_same_with_like(jaxckpt.restore(tmp_path / "c", tree), tree)


@alone_and_packed
@pytest.mark.parametrize(
    "keys",
    [
        [1, 2, 10],
        [-1, 0],
        [2**70, -(2**64)],
        [True, False],
        [0.5, -1e300, 1.0, -0.0],
        [None],
        [(1, "a"), (2, "b")],
        [((1, (2,)), None), ((1, (3,)), None)],
        [()],
        ["1", "2"],
        ["None"],
        ["(1, 2)"],
    ],
    ids=str,
)
def test_keys_of_a_dict_keep_their_types(tmp_path: Path, keys: list[Any], options: SaveOptions | None) -> None:
    tree = {key: np.full(3, number) for number, key in enumerate(keys)}
    jaxckpt.save(tmp_path / "c", {"d": tree, "e": [tree]}, options=options)
    found = jaxckpt.restore(tmp_path / "c")
    assert same(found, {"d": tree, "e": [tree]})
    assert same(jaxckpt.restore(tmp_path / "c", {"d": tree, "e": [tree]}), found)


def same_spelling() -> Any:
    """One mapping whose keys differ by type only, which a plain dict cannot be in JAX: it sorts its keys."""
    return collections.OrderedDict([(1, np.array([1])), ("1", np.array([2])), (None, np.array([3])), ("None", 4)])


@alone_and_packed
@pytest.mark.parametrize("like", [None, same_spelling()], ids=["without like", "with like"])
def test_keys_that_differ_by_type_only_never_meet(tmp_path: Path, like: Any, options: SaveOptions | None) -> None:
    tree = same_spelling()
    try:
        jax.tree_util.tree_flatten_with_path(tree)
    except TypeError as error:
        pytest.skip(f"this jaxlib cannot spell the path of the key None: {error}")  # jaxlib 0.8.0
    jaxckpt.save(tmp_path / "c", tree, options=options)
    assert len(set(names(tmp_path / "c"))) == 4
    found = jaxckpt.restore(tmp_path / "c", like)
    assert same(dict(found), dict(tree))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (np.int64(1), "the dict key .*1.* is of type int64; expected str, int"),
        (b"a", "the dict key b'a' is of type bytes"),
        (float("nan"), "the dict key nan is of type float; expected .* a finite float"),
        (float("inf"), "the dict key inf is of type float"),
        (frozenset(), "the dict key frozenset.* is of type frozenset"),
        ((1, b"a"), "the dict key b'a' is of type bytes"),
        ("a\ud800", "has a lone surrogate"),
        (Point(1, 2), "the dict key Point.* is of type Point"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_key_that_no_file_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, key: Any, message: str
) -> None:
    with pytest.raises(UnsupportedLeafError, match=message):
        jaxckpt.save(tmp_path / "c", {"a": {key: np.ones(2)}})
    assert files_in(tmp_path) == set()


def test_mappings_become_dicts_without_like_and_keep_their_type_with_it(tmp_path: Path) -> None:
    ordered = collections.OrderedDict([("z", np.ones(1)), ("a", np.zeros(2))])
    default = collections.defaultdict(list, {"k": np.ones(3), "j": [1]})
    tree = {"ordered": ordered, "default": default, "frozen": FrozenDict({"w": np.ones(4)})}
    jaxckpt.save(tmp_path / "c", tree)
    found = jaxckpt.restore(tmp_path / "c")
    assert same(found, {"ordered": dict(ordered), "default": dict(default), "frozen": {"w": np.ones(4)}})
    assert list(found["ordered"]) == ["z", "a"]
    assert_same_with_like(jaxckpt.restore(tmp_path / "c", tree), tree)


def test_an_ordered_dict_comes_back_by_name_into_a_plain_dict(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", collections.OrderedDict([("z", np.ones(1)), ("a", np.zeros(2))]))
    found = jaxckpt.restore(tmp_path / "c", {"a": np.ones(2), "z": np.ones(1)})
    assert same(found, {"a": np.zeros(2), "z": np.ones(1)})


@pytest.mark.parametrize(
    "tree",
    [{"1": np.ones(1), "z": {}}, {"b": np.ones(1), "z": {}}, {"b": None, "c": {"d": []}, "e": 1}],
    ids=str,
)
def test_empty_children_of_a_registered_node_keep_their_names(tmp_path: Path, tree: Any) -> None:
    jaxckpt.save(tmp_path / "c", FrozenDict(tree))
    assert same(jaxckpt.restore(tmp_path / "c"), tree)


def test_a_namedtuple_with_generated_field_names_comes_back(tmp_path: Path) -> None:
    row = collections.namedtuple("row", ["id", "class"], rename=True)
    jaxckpt.save(tmp_path / "c", row(1, 2))
    assert_same_with_like(jaxckpt.restore(tmp_path / "c", row(0, 0)), row(1, 2))
    assert tuple(jaxckpt.restore(tmp_path / "c")) == (1, 2)


@pytest.mark.parametrize("depth", [30, 300])
def test_a_deep_tree_comes_back(tmp_path: Path, depth: int) -> None:
    tree: Any = np.ones(2)
    for level in range(depth):
        tree = [tree] if level % 2 else {"deeper": tree}
    jaxckpt.save(tmp_path / "c", tree, options=ALONE)
    found = jaxckpt.restore(tmp_path / "c")
    assert str(found) == str(tree)
    assert_same_with_like(jaxckpt.restore(tmp_path / "c", tree), tree)


@pytest.mark.parametrize("depth", [1100, 5000])
def test_a_tree_that_is_too_deep_is_refused_before_anything_is_written(tmp_path: Path, depth: int) -> None:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    with pytest.raises(UnsupportedLeafError, match="nested too deeply"):
        jaxckpt.save(tmp_path / "c", tree)
    assert files_in(tmp_path) == set()


# Names

COLLISIONS = [
    {"a.b": 1, "a": {"b": 2}},
    {"a/b": 1, "a": {"b": 2}},
    {"A": 1, "a": 2},
    {"A": {"x": 1}, "a": {"x": 2, "X": 3}},
    {"a": {"b/c": 1}, "a/b": {"c": 2}, "a/b/c": 3},
    {"a%2Fb": 1, "a/b": 2, "a%2fb": 3},
    {"": 1, "%": 2, "%25": 3, " ": 4},
    {"": {"": {"": 1}}, "/": 2, "//": 3},
    {"x" * 300: 1, "x" * 299 + "y": 2, "X" * 300: 3},
    {"é": 1, "e\u0301": 2, "É": 3},
    {"ß": 1, "ss": 2, "SS": 3, "ẞ": 4},
    {"a~b": 1, "a": {"~b": 2}, "a%7Eb": 3},
    {"con": 1, "CON": 2, "%63on": 3, "con.txt": 4, "con.": 5},
    {"a": [1, 2], "a/0": 3, "a.0": 4},
    {"0": [1], "1": {"0": 2}},
    {".": 1, "..": 2, "...": 3, "%2E": 4, ".%2E": 5},
    {"leaf": 1, "": 2},
    {"zarr.json": 1, "zarr%2Ejson": 2, "zarr": {"json": 3}},
    {"x.__lock": 1, "x%2E__lock": 2, "x": {"__lock": 3}},
]


@pytest.mark.parametrize("tree", COLLISIONS, ids=lambda tree: ascii(list(tree))[:40])
@alone_and_packed
def test_names_that_look_alike_never_meet(tmp_path: Path, tree: Any, options: SaveOptions | None) -> None:
    tree = jax.tree.map(lambda value: jnp.full((4,), value), tree)
    jaxckpt.save(tmp_path / "c", tree, options=options)
    found = names(tmp_path / "c")
    assert len({name.casefold() for name in found}) == len(found)
    assert same(jaxckpt.restore(tmp_path / "c"), tree)
    assert same(jaxckpt.restore(tmp_path / "c", tree), tree)


HOSTILE = [
    *("", ".", "..", "../..", "../../etc/passwd", "/", "/etc/passwd", "//", "a/../../../b", "a/", "./a", "~", "~root"),
    *("con", "CON", "aux.txt", "nul", "lpt1", "COM9.log", "a.", "a ", " a", "...", "C:\\x", "\\\\host\\x", "a:b"),
    *("🚀", "👨‍👩‍👧‍👦" * 20, "日本" * 80, "x" * 300, "é" * 200, "%" * 100, "\u202egnp", "\ufeff", "e\u0301"),
    *("\n", "a\nb", "\r\n", "\t", "\0", "a\0b", "\x7f", "\x1b[2J"),
    *("%2F", "%", "%%", "%2e%2e", "%00", "*", "?", "[a]", "$HOME", "`x`", "|", "'", '"', "<>", "-rf", "--", "#", "&"),
    *("zarr.json", "ZARR.JSON", "c", "c.0", "c.0.0", "c/0", "manifest.json", "index-0.json", "arrays", "packs"),
    *(".__lock", "a.__lock", "zarr.json.__lock", ".zarray", ".zgroup", "d-" + "0" * 32, ".manifest.json." + "0" * 32),
]


@pytest.mark.parametrize("key", HOSTILE, ids=lambda key: ascii(key)[:30])
def test_a_hostile_key_comes_back_and_no_file_leaves_the_checkpoint(tmp_path: Path, key: str) -> None:
    (tmp_path / "before").mkdir()
    parent = tmp_path / "a" / "b"
    parent.mkdir(parents=True)
    tree = {key: np.arange(3), "nested": {key: [{key: jnp.ones(2)}]}}
    before = files_in(tmp_path)
    jaxckpt.save(parent / "c", tree, options=ALONE)
    outside = {name for name in files_in(tmp_path) if name != "a/b/c" and not name.startswith("a/b/c/")}
    assert outside == before
    [data] = [path for path in (parent / "c").iterdir() if path.name.startswith("d-")]
    assert {path.name for path in (parent / "c").iterdir()} == {"manifest.json", data.name}
    assert {path.name for path in data.iterdir()} <= {"arrays", "packs", "index-0.json"}
    assert all(len(part) <= 255 for name in files_in(parent) for part in Path(name).parts)
    assert same(jaxckpt.restore(parent / "c"), tree)
    assert same(jaxckpt.restore(parent / "c", tree), tree)


def test_all_hostile_keys_live_in_one_tree(tmp_path: Path) -> None:
    tree = {key: np.array([number]) for number, key in enumerate(HOSTILE)}
    tree |= {f"{key}!": {key: np.array([-number])} for number, key in enumerate(HOSTILE)}
    jaxckpt.save(tmp_path / "c", tree, options=ALONE)
    found = names(tmp_path / "c")
    assert len({name.casefold() for name in found}) == len(found)
    assert {path.name for path in tmp_path.iterdir()} == {"c"}
    assert same(jaxckpt.restore(tmp_path / "c"), tree)


texts = st.one_of(
    st.text(max_size=12), st.sampled_from(HOSTILE), st.text("aA./%~\\ \0é", max_size=4), st.integers(0, 20).map(str)
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=20),
    st.integers(0, 3).map(lambda n: np.arange(n, dtype=np.int16)),
    st.integers(0, 3).map(lambda n: jnp.full((2, n), n, jnp.bfloat16)),
    st.floats(width=32).map(np.float32),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(st.integers(), inner, max_size=3),
        st.dictionaries(st.tuples(st.integers(0, 9), texts), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
        st.just(Empty()),
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(tree=trees, alone=st.booleans())
def test_any_tree_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, tree: Any, alone: bool) -> None:
    parent = tmp_path_factory.mktemp("any")
    jaxckpt.save(parent / "c", tree, options=ALONE if alone else None)
    assert {path.name for path in parent.iterdir()} == {"c"}
    assert same(jaxckpt.restore(parent / "c"), tree)
    assert same(jaxckpt.restore(parent / "c", tree), tree)
    found = names(parent / "c")
    assert len({name.casefold() for name in found}) == len(found)


# like


def saved(path: Path) -> Any:
    tree = {"params": {"w": jnp.ones((2, 3)), "b": jnp.arange(3)}, "opt": [np.zeros(4, np.int8), 7], "name": "run"}
    jaxckpt.save(path, tree)
    return tree


@pytest.mark.parametrize("partial", [False, True])
def test_a_leaf_of_like_that_was_not_saved_is_named(tmp_path: Path, partial: bool) -> None:
    like = saved(tmp_path / "c")
    like["params"]["bias"] = jnp.zeros(3)
    message = (
        "leaf params/bias is in `like` but not in the checkpoint; the checkpoint has 5 leaves, the closest is params/b"
    )
    with pytest.raises(LeafMismatchError, match=message):
        jaxckpt.restore(tmp_path / "c", like, options=RestoreOptions(partial=partial))


def test_a_saved_leaf_that_like_leaves_out_is_named(tmp_path: Path) -> None:
    like = saved(tmp_path / "c")
    del like["params"]["w"]
    with pytest.raises(
        LeafMismatchError, match=r"leaf params/w is in the checkpoint but not in `like`; .*partial=True"
    ):
        jaxckpt.restore(tmp_path / "c", like)
    del like["opt"]
    with pytest.raises(
        LeafMismatchError, match=r"leaf opt/0 is in the checkpoint but not in `like` \(nor are 2 others\)"
    ):
        jaxckpt.restore(tmp_path / "c", like)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (2,), (), (6,), (2, 4)], ids=str)
def test_a_resized_leaf_is_named_with_both_shapes(tmp_path: Path, shape: tuple[int, ...], partial: bool) -> None:
    like = saved(tmp_path / "c")
    like["params"]["w"] = jax.ShapeDtypeStruct(shape, np.float32)
    if partial:
        del like["opt"]
    message = rf"leaf params/w: `like` has shape \({', '.join(map(str, shape))},?\), the checkpoint \(2, 3\)"
    with pytest.raises(LeafMismatchError, match=message):
        jaxckpt.restore(tmp_path / "c", like, options=RestoreOptions(partial=partial))


@pytest.mark.parametrize("like", [{}, [], {"params": None}, [1]], ids=str)
def test_an_empty_or_foreign_like_is_not_taken_for_the_whole_tree(tmp_path: Path, like: Any) -> None:
    saved(tmp_path / "c")
    with pytest.raises(LeafMismatchError, match=r"(in the checkpoint but not in `like`|but not in the checkpoint)"):
        jaxckpt.restore(tmp_path / "c", like)


@pytest.mark.parametrize(
    "choose",
    [
        lambda tree: {"params": tree["params"]},
        lambda tree: {"params": {"w": tree["params"]["w"]}, "name": tree["name"]},
        lambda tree: {"opt": tree["opt"]},
        lambda tree: {"opt": tree["opt"][:1]},
        lambda tree: {},
        lambda tree: tree,
    ],
    ids=["a subtree", "two leaves", "a list", "the start of a list", "nothing", "everything"],
)
def test_a_part_of_the_tree_is_restored_when_that_is_asked_for(tmp_path: Path, choose: Any) -> None:
    like = choose(saved(tmp_path / "c"))
    assert same(jaxckpt.restore(tmp_path / "c", like, options=RestoreOptions(partial=True)), like)


def test_a_partial_restore_does_not_read_what_it_leaves_out(tmp_path: Path) -> None:
    tree = {"a": np.arange(1000), "b": np.arange(1000)}
    jaxckpt.save(tmp_path / "c", tree, options=ALONE)
    [chunk] = (tmp_path / "c").glob("d-*/arrays/b/c.0")
    chunk.unlink()
    assert same(
        jaxckpt.restore(tmp_path / "c", {"a": tree["a"]}, options=RestoreOptions(partial=True)), {"a": tree["a"]}
    )
    with pytest.raises(jaxckpt.CorruptCheckpointError, match=r"leaf b: the file .* is missing"):
        jaxckpt.restore(tmp_path / "c")


def test_describe_tells_the_tree_with_structs_for_arrays(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    tree = jaxckpt.describe(tmp_path / "c").tree
    assert tree["params"]["w"] == jax.ShapeDtypeStruct((2, 3), np.float32)
    assert (tree["opt"][1], tree["name"]) == (7, "run")
    assert isinstance(jaxckpt.restore(tmp_path / "c", tree)["opt"][0], jax.Array | np.ndarray)


# Libraries


def gradients(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.full(p.shape, 0.5, p.dtype), params)


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10), mu_dtype=jnp.bfloat16),
    "sgd": lambda: optax.sgd(1e-2),
    "clipped momentum": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
    "adafactor": lambda: optax.adafactor(1e-2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "partitioned": lambda: optax.partition({"x": optax.adam(1e-2), "y": optax.sgd(0.1)}, {"w": "x", "b": "y"}),
    "multi-step": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


@alone_and_packed
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizer_state_comes_back_into_like(tmp_path: Path, make: Any, options: SaveOptions | None) -> None:
    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
    optimizer = make()
    _, state = optimizer.update(gradients(params), optimizer.init(params), params)
    jaxckpt.save(tmp_path / "c", state, options=options)
    for like in (optimizer.init(params), jax.eval_shape(optimizer.init, params)):
        found = jaxckpt.restore(tmp_path / "c", like)
        assert_same_with_like(found, state)


def test_adam_state_is_usable_without_like(tmp_path: Path) -> None:
    params = {"w": jnp.ones((3, 4)), "layers": [{"b": jnp.zeros(4)}]}
    optimizer = optax.adam(1e-2)
    _, state = optimizer.update(gradients(params), optimizer.init(params), params)
    jaxckpt.save(tmp_path / "c", state)
    found = jaxckpt.restore(tmp_path / "c")
    assert same(found, state)
    assert type(found) is tuple
    assert type(found[0]).__name__ == "ScaleByAdamState"
    assert found[0]._fields == ("count", "mu", "nu")
    assert found[1]._fields == ()
    expected, _ = optimizer.update(gradients(params), state, params)
    updates, _ = optimizer.update(gradients(params), found, params)
    assert same(updates, expected)


def test_a_flax_linen_train_state_comes_back(tmp_path: Path) -> None:
    model = nn.Dense(4)
    variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2))
    trained = state.apply_gradients(grads=gradients(state.params))
    jaxckpt.save(tmp_path / "c", {"state": trained, "variables": variables})
    found = jaxckpt.restore(tmp_path / "c", {"state": state, "variables": variables})
    assert_same_with_like(found, {"state": trained, "variables": variables})
    assert found["state"].apply_fn == model.apply
    assert found["state"].step == 1
    assert_same_with_like(
        found["state"].apply_gradients(grads=gradients(state.params)),
        trained.apply_gradients(grads=gradients(state.params)),
    )


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.layers[1](self.layers[0](x)), use_running_average=True)


def test_flax_nnx_state_comes_back(tmp_path: Path) -> None:
    model, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    state = nnx.state(model)
    jaxckpt.save(tmp_path / "c", state)
    for like in (nnx.state(other), nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(2))))):
        found = jaxckpt.restore(tmp_path / "c", like)
        assert_same_with_like(found, state)
        nnx.update(other, found)
        assert same(other(jnp.ones((1, 3))), model(jnp.ones((1, 3))))


def test_flax_nnx_state_as_a_pure_dict_comes_back_without_like(tmp_path: Path) -> None:
    pure = nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)), nnx.Param))
    jaxckpt.save(tmp_path / "c", pure)
    assert same(jaxckpt.restore(tmp_path / "c"), pure)


def test_an_equinox_module_comes_back(tmp_path: Path) -> None:
    model = eqx.nn.MLP(2, 3, 8, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    jaxckpt.save(tmp_path / "c", arrays)
    like = eqx.filter(eqx.nn.MLP(2, 3, 8, 2, key=jax.random.key(1)), eqx.is_array)
    for wish in (like, eqx.filter_eval_shape(lambda: like)):
        found = jaxckpt.restore(tmp_path / "c", wish)
        assert_same_with_like(found, arrays)
        assert same(eqx.combine(found, static)(jnp.ones(2)), model(jnp.ones(2)))
    weight = jaxckpt.restore(tmp_path / "c")["layers"][0]["weight"]
    assert same(weight, model.layers[0].weight)


def test_an_unfiltered_equinox_module_is_refused_with_a_hint(tmp_path: Path) -> None:
    model = eqx.nn.Lambda(lambda x: x)
    with pytest.raises(UnsupportedLeafError, match=r"leaf fn is of type builtins.function; .*equinox.filter"):
        jaxckpt.save(tmp_path / "c", model)
    assert files_in(tmp_path) == set()


@flax.struct.dataclass
class Config:
    scale: Any
    inner: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    a: Any
    b: Any
    note: str = dataclasses.field(metadata={"static": True}, default="static")


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A node that tells JAX no keys, as many older ones do."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> Any:
        return self.children, "aux"

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Doubled(Keyless):
    """A node that gives both of its children the same key."""

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("twin"), child) for child in self.children], None


@pytest.mark.parametrize(
    ("node", "plain"),
    [
        (Config(np.ones(2), {"k": jnp.zeros(3)}, "kept"), {"scale": np.ones(2), "inner": {"k": jnp.zeros(3)}}),
        (Registered(np.ones(2), [1, None], "kept"), {"a": np.ones(2), "b": [1, None]}),
        (Registered(None, np.ones(2)), {"a": None, "b": np.ones(2)}),
        (Keyless(np.ones(2), {"x": 3}), {0: np.ones(2), 1: {"x": 3}}),
        (Keyless(None, np.ones(2)), {0: None, 1: np.ones(2)}),
        (Keyless(), {}),
    ],
    ids=["flax struct", "dataclass", "dataclass with None", "keyless", "keyless with None", "keyless, empty"],
)
def test_a_registered_node_comes_back_with_like_and_as_a_dict_without(tmp_path: Path, node: Any, plain: Any) -> None:
    jaxckpt.save(tmp_path / "c", {"node": node, "list": [node]}, options=ALONE)
    like = {"node": node, "list": [node]}
    found = jaxckpt.restore(tmp_path / "c", like)
    assert_same_with_like(found, like)
    assert getattr(found["node"], "name", "kept") == "kept"
    assert same(jaxckpt.restore(tmp_path / "c"), {"node": plain, "list": [plain]})


@alone_and_packed
def test_children_with_the_same_key_are_refused_or_come_back_apart(tmp_path: Path, options: SaveOptions | None) -> None:
    node = Doubled(np.array([1]), np.array([2]))
    try:
        jaxckpt.save(tmp_path / "c", node, options=options)
    except UnsupportedLeafError as error:
        assert "twin" in str(error)
        assert files_in(tmp_path) == set()
    else:
        assert_same_with_like(jaxckpt.restore(tmp_path / "c", node), node)


def test_one_array_that_stands_twice_in_the_tree_comes_back_twice(tmp_path: Path) -> None:
    shared = jnp.arange(3)
    tree = {"a": shared, "b": [shared, shared]}
    jaxckpt.save(tmp_path / "c", tree)
    assert same(jaxckpt.restore(tmp_path / "c"), tree)
