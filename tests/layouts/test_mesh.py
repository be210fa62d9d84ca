"""The mesh as a value, and its binding to devices."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest
from generated import abstract_meshes, bound_meshes, meshes
from hypothesis import given
from jax.sharding import AbstractMesh

import meshwright as mw
from meshwright import Mesh, MeshError, MeshwrightError, create_mesh, topology
from meshwright.testing import run_in_fresh_process

AXES = {"batch": 4, "model": 2}


class Quarrelsome:
    """Raises when it is compared with anything."""

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


# A value


def test_says_what_it_is():
    mesh = Mesh(AXES)
    assert mesh.axes == (("batch", 4), ("model", 2))
    assert mesh.axis_names == ("batch", "model")
    assert mesh.shape == (4, 2)
    assert mesh.size == 8
    assert mesh["model"] == mesh.axis_size("model") == 2
    assert "model" in mesh
    assert "data" not in mesh
    assert 3 not in mesh
    assert mesh.is_abstract
    assert mesh.platform is None
    assert not mesh.is_single_device
    assert Mesh({"x": 1}).is_single_device


def test_pairs_and_mappings_and_numpy_sizes_make_the_same_mesh():
    expected = Mesh(AXES)
    assert Mesh([("batch", 4), ("model", 2)]) == expected
    assert Mesh(iter([("batch", 4), ("model", 2)])) == expected
    numpy_sized = Mesh({"batch": np.int64(4), "model": np.int32(2)})
    assert numpy_sized == expected
    assert repr(numpy_sized) == repr(expected)


def test_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Mesh(AXES).axes = ()


def test_update_makes_another_mesh_and_leaves_the_first():
    mesh = create_mesh(AXES, name="pod")
    assert mesh.update(axes={"x": 8}).axis_names == ("x",)
    assert mesh.update(axes={"x": 8}).devices == mesh.devices
    assert mesh.abstract() == Mesh(AXES, name="pod")
    assert mesh.axes == Mesh(AXES).axes
    with pytest.raises(TypeError, match="axis"):
        mesh.update(axis={"x": 8})


@pytest.mark.parametrize(
    "other",
    [3, None, "batch=4, model=2", AXES, np.arange(2), np.zeros(2, [("a", "i4")]), Quarrelsome()],
    ids=lambda other: type(other).__name__,
)
def test_equality_with_anything_is_a_plain_no(other):
    assert (Mesh(AXES) == other) is False
    assert (Mesh(AXES) != other) is True


def test_equality_with_a_traced_value_is_a_plain_no():
    answers = []
    jax.jit(lambda x: answers.append(Mesh(AXES) == x) or x)(1.0)
    assert answers == [False]


def test_axes_devices_and_their_order_make_the_difference():
    bound = create_mesh(AXES)
    others = [
        Mesh(AXES),
        bound.update(axes={"model": 2, "batch": 4}),
        bound.update(axes={"batch": 4, "m": 2}),
        bound.update(devices=bound.devices[::-1]),
    ]
    assert all(bound != other for other in others)
    assert len({bound, *others}) == 5


def test_the_name_is_a_label_and_makes_no_difference():
    bound = create_mesh(AXES)
    assert bound == bound.update(name="pod")
    assert hash(bound) == hash(bound.update(name="pod"))


@given(meshes)
def test_equal_meshes_hash_alike_and_copies_are_equal(mesh):
    for twin in (Mesh(mesh.axes, mesh.devices, mesh.name), copy.copy(mesh), copy.deepcopy(mesh)):
        assert twin == mesh
        assert hash(twin) == hash(mesh)


@given(meshes)
def test_text_and_pickle_lead_back(mesh):
    assert Mesh.from_string(str(mesh)) == mesh
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(mesh, protocol)) == mesh


@given(abstract_meshes())
def test_repr_of_an_abstract_mesh_can_be_pasted_back(mesh):
    assert eval(repr(mesh)) == mesh


def test_text_is_short_and_keeps_the_order_of_devices():
    mesh = create_mesh(AXES, devices=[f"cpu:{i}" for i in (0, 1, 2, 7, 6, 5, 3, 4)], name="pod")
    assert str(mesh) == "pod: batch=4, model=2 @ cpu:0-2,7,6,5,3-4"
    assert repr(mesh) == ("Mesh({'batch': 4, 'model': 2}, devices=<cpu:0-2,7,6,5,3-4>, name='pod')")


def test_text_with_devices_that_are_not_here_comes_back_abstract():
    assert Mesh.from_string("batch=2 @ cpu:98,99") == Mesh({"batch": 2})
    assert Mesh.from_string("batch=2 @ quantum:0-1") == Mesh({"batch": 2})


@pytest.mark.parametrize(
    "text",
    ["", "8", "batch", "batch=", "batch=4 model", "=4", "batch=-1", "a=2 @ cpu", "a=2 @ cpu:x"],
)
def test_text_that_is_no_mesh_is_an_error_that_shows_the_text(text):
    with pytest.raises(MeshError) as error:
        Mesh.from_string(text)
    assert repr(text) in str(error.value)
    assert "batch=4, model=2 @ cpu:0-7" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=2 @ cpu:0-7", "'a=2 @ cpu:0-7' names 8 device.s., but its axes make 2"),
        ("a=2 @ cpu:0-99999999999999999999", "but its axes make 2"),
        ("a=8 @ cpu:7-0", "invalid devices after '@'"),
        ("a=2 @ cpu:0,0", "the same device appears twice in the mesh: cpu:0"),
        ("a=2, a=4", "axis 'a' appears 2 times"),
    ],
)
def test_text_that_contradicts_itself_is_an_error(text, message):
    with pytest.raises(MeshError, match=message):
        Mesh.from_string(text)


# Positions


@given(meshes)
def test_coords_and_strides_agree_with_numpy(mesh):
    for position in {0, mesh.size // 2, mesh.size - 1}:
        index = np.unravel_index(position, mesh.shape)
        assert tuple(mesh.coords(position).values()) == tuple(map(int, index))
        assert position == sum(i * s for i, s in zip(index, mesh.strides, strict=True))
    assert mesh.strides == tuple(s // 8 for s in np.empty(mesh.shape).strides)


def test_unravel_index_lists_every_position():
    assert Mesh({"a": 2, "b": 2}).unravel_index() == {
        0: {"a": 0, "b": 0},
        1: {"a": 0, "b": 1},
        2: {"a": 1, "b": 0},
        3: {"a": 1, "b": 1},
    }


@pytest.mark.parametrize("position", [-1, 8, 2.0, "a", True])
def test_a_position_outside_is_an_error_and_does_not_wrap_around(position):
    with pytest.raises(MeshError, match=r"no device at position .* has positions 0 to 7"):
        Mesh(AXES).coords(position)


# Binding to devices


def test_create_mesh_takes_all_devices_row_major():
    mesh = create_mesh(AXES)
    assert mesh.devices == tuple(jax.devices())
    assert mesh.platform == "cpu"
    assert mesh.global_device_ids == mesh.local_device_ids == tuple(range(8))
    assert mesh.local_devices == mesh.devices
    assert not mesh.is_abstract
    assert not mesh.is_remote


def test_without_axes_there_is_one_axis_over_everything():
    assert create_mesh().axes == (("x", 8),)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"a": -1}, (8,)),
        ({"a": -1, "b": 2}, (4, 2)),
        ({"a": 2, "b": -1, "c": 2}, (2, 2, 2)),
        ({"a": 8, "b": -1}, (8, 1)),
    ],
)
def test_minus_one_stands_once_for_the_rest(axes, shape):
    assert create_mesh(axes).shape == shape


def test_devices_are_given_as_such_or_by_name_and_may_be_a_subset():
    by_name = create_mesh({"a": 2}, devices=["cpu:5", "CPU:2"])
    assert by_name == create_mesh({"a": -1}, devices=[jax.devices()[5], jax.devices()[2]])
    assert by_name == create_mesh({"a": 2}, devices=["5", "2"], platform="cpu")
    assert by_name.global_device_ids == (5, 2)
    assert create_mesh({"a": -1}, devices=np.array(jax.devices()[:4])).size == 4


def test_a_mesh_of_one_device_and_a_mesh_on_the_host():
    device = jax.devices()[3]
    assert Mesh.from_device(device).devices == (device,)
    assert Mesh.from_device(device, axis="x").axis_names == ("x",)
    assert Mesh({"a": 2, "b": 2}, name="pod").host_mesh().devices == tuple(jax.devices("cpu")[:4])


def test_an_abstract_mesh_tells_how_to_bind_it():
    mesh = Mesh(AXES)
    for ask in (mesh.bound_devices, lambda: mesh.local_devices, lambda: mesh.global_device_ids):
        with pytest.raises(
            mw.TopologyError, match=r"abstract.*create_mesh\(.*virtual_devices\(8\)"
        ):
            ask()


@given(bound_meshes(names=abstract_meshes().map(lambda _: "")))
def test_jax_meshes_lead_back(mesh):
    assert Mesh.from_jax(mesh.jax_mesh) == mesh
    assert mesh.jax_mesh.devices.shape == mesh.shape
    assert tuple(mesh.jax_mesh.devices.flat) == mesh.devices
    assert isinstance(mesh.abstract().jax_mesh, AbstractMesh)
    assert Mesh.from_jax(mesh.abstract().jax_mesh) == mesh.abstract()
    assert Mesh.from_jax(mesh.jax_mesh.abstract_mesh) == mesh.abstract()


def test_where_a_mesh_of_jax_is_passed_the_error_says_how_to_make_ours_of_it():
    theirs = jax.make_mesh((8,), ("batch",))
    for pass_it in (Mesh, mw.create_mesh, lambda mesh: mw.Placement(mesh, ())):
        with pytest.raises(mw.MeshError, match=r"mw\.Mesh\.from_jax\(mesh\) makes one"):
            pass_it(theirs)


# Bad input: each a ValueError of our tree that names names and values

DEVICES = tuple(f"cpu:{i}" for i in range(8))

FAULTS = {
    "no axes": (lambda: Mesh({}), "at least one axis"),
    "a bare text": (lambda: Mesh("batch=4"), "pairs .* received 'batch=4'"),
    "a bare number": (lambda: Mesh(4), "pairs .* received 4"),
    "names alone": (lambda: Mesh(["batch", "model"]), r"pairs .* received \['batch', 'model'\]"),
    "an axis twice": (
        lambda: Mesh([("batch", 4), ("batch", 2)]),
        r"axis 'batch' appears 2 times in \['batch', 'batch'\]",
    ),
    "unsharded as a name": (lambda: Mesh({"unsharded": 4}), "'unsharded' is a reserved name"),
    "match as a name": (lambda: Mesh({"match": 4}), "'match' is a reserved name"),
    "a name with a blank": (lambda: Mesh({"my axis": 4}), "invalid axis name 'my axis'"),
    "a name beginning with a digit": (lambda: Mesh({"2d": 4}), "invalid axis name '2d'"),
    "a number as a name": (lambda: Mesh({4: 4}), "invalid axis name 4"),
    "a list as a name": (lambda: Mesh([(["a"], 4)]), r"invalid axis name \['a'\]"),
    "no name": (lambda: Mesh({"": 4}), "invalid axis name ''"),
    "size zero": (lambda: Mesh({"batch": 0}), "axis 'batch' has size 0; .*, at least 1"),
    "a negative size": (lambda: Mesh({"batch": -4}), "axis 'batch' has size -4"),
    "the rest, of nothing": (lambda: Mesh({"batch": -1}), "axis 'batch' has size -1"),
    "half a size": (lambda: Mesh({"batch": 2.5}), "axis 'batch' has size 2.5"),
    "a size in words": (lambda: Mesh({"batch": "4"}), "axis 'batch' has size '4'"),
    "a truth as a size": (lambda: Mesh({"batch": True}), "axis 'batch' has size True"),
    "a bad name of the mesh": (lambda: Mesh(AXES, name="my pod"), "name 'my pod'"),
    "no text as a name": (lambda: Mesh(AXES, name=5), "name 5"),
    "names for devices": (lambda: Mesh({"a": 1}, ["cpu:0"]), "JAX devices; received 'cpu:0'"),
    "too few devices": (
        lambda: Mesh(AXES, jax.devices()[:6]),
        r"batch=4 x model=2 makes 8 devices, but there are 6",
    ),
    "the same device twice": (
        lambda: Mesh({"a": 2}, [jax.devices()[3]] * 2),
        "the same device appears twice in the mesh: .*3",
    ),
    "an unknown axis": (
        lambda: Mesh(AXES)["data"],
        "axis 'data' is not an axis .*batch=4, model=2.* 'batch', 'model'",
    ),
    "create: an axis twice": (
        lambda: create_mesh([("a", 4), ("a", -1)]),
        "axis 'a' appears 2 times",
    ),
    "create: -1 twice": (
        lambda: create_mesh({"a": -1, "b": -1}),
        "-1 .* more than one axis; only one",
    ),
    "create: -2": (lambda: create_mesh({"a": -2}), "axis 'a' has size -2; .* or -1 once"),
    "create: nothing left for the rest": (
        lambda: create_mesh({"a": -1, "b": 3}),
        "a=-1, b=3 .* 8 devices do not divide by 3",
    ),
    "create: too many": (
        lambda: create_mesh({"a": 4, "b": 4}),
        r"a=4 x b=4 makes 16 devices, but there are 8.*virtual_devices\(16\)",
    ),
    "create: too few": (
        lambda: create_mesh({"a": 3}),
        r"a=3 makes 3 devices, but there are 8.*jax.devices\(\)\[:3\]",
    ),
    "create: not as many as given": (
        lambda: create_mesh({"a": 2}, devices=DEVICES[:3]),
        "a=2 makes 2 devices, but there are 3",
    ),
    "create: no devices": (lambda: create_mesh({"a": -1}, devices=[]), r"devices=\[\]"),
    "create: no such device": (
        lambda: create_mesh({"a": 2}, devices=["cpu:0", "cpu:99"]),
        "no device 'cpu:99'. JAX has cpu:0-7",
    ),
    "create: an id": (
        lambda: create_mesh({"a": 1}, devices=[3]),
        "expected a JAX device or its name.*received 3",
    ),
    "create: the same device twice": (
        lambda: create_mesh({"a": -1}, devices=["cpu:0", "cpu:0"]),
        "the same device appears twice in the mesh: cpu:0",
    ),
    "create: devices of another platform": (
        lambda: create_mesh({"a": 1}, devices=["cpu:0"], platform="tpu"),
        "device 'cpu:0' is not of platform 'tpu'",
    ),
}


@pytest.mark.parametrize(("build", "message"), FAULTS.values(), ids=FAULTS)
def test_bad_input_is_a_value_error_with_names_and_values(build, message):
    with pytest.raises(MeshError, match=message) as error:
        build()
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, MeshwrightError)


def test_too_few_devices_of_a_group_are_asked_of_its_launcher(monkeypatch):
    monkeypatch.setattr(topology, "process_count", lambda: 2)
    with pytest.raises(mw.MeshError, match=r"2 processes needs 8 devices: .* --devices 8`"):
        mw.create_mesh({"batch": 4, "model": 4})


def test_all_faults_stand_in_one_error():
    with pytest.raises(MeshError) as error:
        Mesh([("match", 0), ("a b", 2), ("x", 1), ("x", 1)])
    for fault in (
        "'match' is a reserved name",
        "'match' has size 0",
        "invalid axis name 'a b'",
        "'x' appears 2",
    ):
        assert fault in str(error.value)


def test_a_platform_that_is_not_here_is_a_topology_error():
    with pytest.raises(mw.TopologyError, match="no devices of platform 'quantum'"):
        create_mesh({"a": 1}, platform="quantum")


def test_thousands_of_devices_are_checked_in_no_time():
    class Device:
        platform = "tpu"

        def __init__(self, id):
            self.id = id

    mesh = Mesh({"pod": 96, "chip": 64}, [Device(i) for i in range(6144)])
    assert str(mesh) == "pod=96, chip=64 @ tpu:0-6143"


# Other processes


def test_read_where_the_devices_are_missing_a_mesh_comes_back_abstract(tmp_path):
    eight, two = create_mesh(AXES, name="pod"), create_mesh({"a": 2}, devices=["cpu:1", "cpu:0"])
    file = tmp_path / "meshes.pickle"
    file.write_bytes(pickle.dumps([(eight, str(eight)), (two, str(two))]))
    out = run_in_fresh_process(
        f"""
        import pickle
        from pathlib import Path
        import meshwright as mw
        from meshwright._compat import jax_is_running

        def read():
            pairs = pickle.loads(Path({str(file)!r}).read_bytes())
            for pickled, text in pairs:
                assert mw.Mesh.from_string(text) == pickled
            return [pickled for pickled, _ in pairs]

        print(*(repr(m) for m in read()), jax_is_running())
        mw.virtual_devices(4)
        mw.create_mesh()
        print(*(repr(m) for m in read()), jax_is_running())
        """
    )
    assert out.splitlines() == [
        "Mesh({'batch': 4, 'model': 2}, name='pod') Mesh({'a': 2}) False",
        "Mesh({'batch': 4, 'model': 2}, name='pod') Mesh({'a': 2}, devices=<cpu:1,0>) True",
    ]


def test_an_abstract_mesh_never_starts_jax():
    out = run_in_fresh_process(
        """
        import pickle
        import meshwright as mw
        from meshwright._compat import jax_is_running

        mesh = mw.Mesh({"batch": 4, "model": 2}, name="pod")
        hash(mesh), str(mesh), repr(mesh), mesh.strides, mesh.unravel_index(), mesh["model"]
        mesh == mw.Mesh.from_string("batch=4, model=2 @ cpu:0-7"), pickle.loads(pickle.dumps(mesh))
        mesh.jax_mesh, mw.Mesh.from_jax(mesh.jax_mesh)
        try:
            mw.Mesh({"batch": 0}), mesh.bound_devices()
        except mw.MeshwrightError:
            pass
        print(jax_is_running())
        """
    )
    assert out == "False\n"
