"""Reading a compiled program's text, by hand and against the compiler's own count."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from several_devices import on_eight_devices

from md4_jax.perf.hlo import size_of, traffic
from md4_jax.runtime.scopes import LIKELY, turns

LOOPS = """HloModule jit_f

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %g = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}

%condition (state: (s32[], f32[8,4])) -> pred[] {
  %n = s32[]{:T(128)} constant(12)
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%known (state: (s32[])) -> (s32[]) {
  %p = f32[5]{0} collective-permute(%s), source_target_pairs={{0,1},{1,0}}
}

%full (p: f32[2]) -> f32[2] {
  %all = f32[2,8]{1,0} all-to-all(%x), replica_groups={{0,1}}
  %copy.1 = f32[2,8]{1,0} copy(%all)
}

%few (p: f32[2]) -> f32[2] {
  %copy.2 = f32[2]{0} copy(%x)
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]) while(%t), condition=%condition, body=%body, metadata={op_name="a"}
  %v = (s32[]) while(%t), condition=%c, body=%known, backend_config={"known_trip_count":{"n":"3"}}
  %o = f32[2] conditional(%n, %p, %p), branch_computations={%full, %few}
  %r = (bf16[16], bf16[2,3]) all-reduce(%a, %b), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %s = f32[10]{0} reduce-scatter(%r), replica_groups=[1,8]<=[8], to_apply=%sum
  %b = (f32[4]{0}, f32[32]{0}) all-gather-start(%p), replica_groups=mesh['x'=2,'y'=4] {'x','y'}
  %e = f32[32]{0} all-gather-done(%b)
  %m = f32[6]{0} all-to-all(%p), replica_groups=mesh['x'=2,'y'=4] {'y'}
  %h = f32[6]{0} all-to-all(%p), replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}
}
"""


# A gather of 64 bytes that two products, of 32 and 16 bytes, overlap; the second updates an array.
OVERLAPPED = """HloModule jit_f

%begin (p: f32[4]) -> (f32[4], f32[16], s32[2]) {
  %p = f32[4]{0} parameter(0)
  %g.0 = f32[16]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %c = (f32[4], f32[16]) custom-call(%g.0), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion (p: f32[4], w: f32[16], x: f32[8]) -> (f32[8], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %w = f32[16]{0} parameter(1)
  %x = f32[8]{0} parameter(2)
  %y = f32[8]{0} add(%x, %x)
  %g.1 = f32[16]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %t = (f32[8], f32[4], f32[16], f32[16]) tuple(%y, %p, %w, %g.1)
}

%async_collective_fusion.1 (p: f32[4], w: f32[16], a: f32[99]) -> (f32[99], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %w = f32[16]{0} parameter(1)
  %a = f32[99]{0} parameter(2)
  %u = f32[4]{0} parameter(3)
  %n = s32[]{:S(2)} parameter(4)
  %g.2 = f32[16]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  %b = f32[99]{0} dynamic-update-slice(%a, %u, %n)
  ROOT %t = (f32[99], f32[4], f32[16]) tuple(%b, %p, %w)
}

%end (p: f32[4], w: f32[16]) -> f32[16] {
  %p = f32[4]{0} parameter(0)
  %w = f32[16]{0} parameter(1)
  %g.3 = f32[16]{0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %c = f32[16]{0} custom-call(%p, %w, %g.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[4], x: f32[8], a: f32[99], u: f32[4], n: s32[]) -> f32[16] {
  %p = f32[4]{0} parameter(0)
  %x = f32[8]{0} parameter(1)
  %a = f32[99]{0} parameter(2)
  %u = f32[4]{0} parameter(3)
  %n = s32[]{:S(2)} parameter(4)
  %f = (f32[4], f32[16]) fusion(%p), kind=kCustom, calls=%begin
  %w = f32[16]{0} get-tuple-element(%f), index=1
  %h = (f32[8], f32[4]) fusion(%p, %w, %x), kind=kCustom, calls=%async_collective_fusion
  %i = (f32[99], f32[4]) fusion(%p, %w, %a, %u, %n), kind=kCustom, calls=%async_collective_fusion.1
  ROOT %e = f32[16]{0} fusion(%p, %w), kind=kCustom, calls=%end
}
"""


def test_a_collective_that_fusions_overlap_is_counted_once():
    """The first fusion reads and writes what is gathered; others only what they compute."""
    found = traffic(OVERLAPPED)
    assert found.collectives == {"all-gather": (1, 64 * 3 / 4)}
    begun, index = 16 + (16 + 64), 4
    assert found.moved == begun + (32 + 32) + (16 + 16 + index)


def test_collectives_with_their_bytes_and_as_often_as_their_loop_runs():
    """By hand: 12 gathers of 128 bytes, 3/4 of them received; 3 permutes of 20; and so on."""
    assert traffic(LOOPS).collectives == {
        "all-gather": (13, 12 * 128 * 3 / 4 + 128 * 7 / 8),
        "collective-permute": (3, 3 * 20),
        "all-reduce": (1, 2 * 44 / 2),
        "reduce-scatter": (1, 40 * 7),
        "all-to-all": (2, 24 * 3 / 4 + 24 / 2),
    }


UNKNOWN = """
%body (state: (s32[])) -> (s32[]) {
  %p = f32[5]{0} collective-permute(%s), source_target_pairs={{0,1},{1,0}}
}

%condition (state: (s32[], s32[])) -> pred[] {
  ROOT %less = pred[] compare(%i, %j), direction=LT
}

ENTRY %main (p: s32[]) -> s32[] {
  %w = (s32[]) while(%t), condition=%condition, body=%body
}
"""


def test_a_loop_whose_length_the_data_decide_runs_as_often_as_is_said():
    assert traffic(UNKNOWN).collectives == {"collective-permute": (1, 20)}
    assert traffic(UNKNOWN, 7).collectives == {"collective-permute": (7, 140)}


SLICES = """
%read (p0: f32[12,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[12,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %d = f32[1,8]{1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,8}
  ROOT %n = f32[1,8]{1,0} negate(%d)
}

%write (p0: f32[12,8], p1: f32[1,8], p2: s32[]) -> f32[12,8] {
  %p0 = f32[12,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %u = f32[12,8]{1,0} dynamic-update-slice(%p0, %p1, %p2)
}

ENTRY %main (x: f32[12,8], i: s32[]) -> f32[12,8] {
  %x = f32[12,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %fast = f32[12,8]{1,0:T(8,128)S(1)} copy(%x)
  %f = f32[1,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%read
  ROOT %g = f32[12,8]{1,0} fusion(%x, %f, %i), kind=kLoop, calls=%write
}
"""


def test_a_slice_counts_and_not_what_it_is_a_slice_of():
    """Copied to vector memory: 384 read. Read: 32 + 4 and 32 written. Written: 32 + 4 and 32."""
    assert traffic(SLICES).moved == 384 + (32 + 4 + 32) + (32 + 4 + 32)


NESTED = """
%inner (p0: s32[], p1: f32[1,96]) -> f32[1,8] {
  %p0 = s32[] parameter(0)
  %p1 = f32[1,96]{1,0} parameter(1)
  ROOT %d = f32[1,8]{1,0} dynamic-slice(%p1, %p0), dynamic_slice_sizes={1,8}
}

%outer (p0: f32[12,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[12,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %flat = f32[1,96]{1,0} bitcast(%p0)
  ROOT %f = f32[1,8]{1,0} fusion(%p1, %flat), kind=kLoop, calls=%inner
}

ENTRY %main (x: f32[12,8], i: s32[]) -> f32[1,8] {
  %x = f32[12,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = f32[1,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%outer
}
"""


def test_a_slice_inside_of_a_fusion_in_a_fusion():
    """32 bytes and an index of 4 read, 32 written; all of x where something else needs it."""
    assert traffic(NESTED).moved == 32 + 4 + 32
    more = NESTED.replace("  %flat", "  %n = f32[12,8]{1,0} negate(%p0)\n  %flat")
    assert traffic(more).moved == 384 + 4 + 32


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[3,4]{1,0}", 48), ("bf16[5]", 10), ("pred[7]{0}", 7), ("s4[6]{0}", 3), ("f32[]", 4),
        ("(f64[2]{0}, u8[3]{0}, /*index=2*/c64[1]{0})", 27), ("f8e4m3fn[9]", 9), ("token[]", 0),
        ("f32[8]{0:T(128)S(1)}", 0),
    ],
)  # fmt: skip
def test_sizes(shape, size):
    assert size_of(shape) == size


def sum_over_devices():
    """Run by itself: prints the collectives of a sum over a split axis."""
    split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    x = jax.ShapeDtypeStruct((8 * 4, 96), jnp.float32, sharding=split)
    text = jax.jit(lambda x: jnp.sum(x, axis=0)).lower(x).compile().as_text()
    print(json.dumps(traffic(text).collectives))


def test_an_all_reduce_compiled_here():
    """A sum over a split axis: one all-reduce of the result, 2 n (g - 1) / g bytes."""
    found = json.loads(on_eight_devices("test_hlo", "sum_over_devices").splitlines()[-1])
    assert found == {"all-reduce": [1, pytest.approx(2 * 96 * 4 * 7 / 8)]}


def layers(x, kernels, *, scan: bool):
    def layer(x, kernel):
        return jax.nn.silu(x @ kernel) + x, None

    if scan:
        return jnp.sum(jax.lax.scan(layer, x, kernels)[0])
    for kernel in kernels:
        x, _ = layer(x, kernel)
    return jnp.sum(x)


def compiled(fn, *, scan: bool, depth: int = 6):
    x, kernels = jnp.ones((256, 128)), jnp.ones((depth, 128, 128))
    return jax.jit(fn(lambda kernels, x: layers(x, kernels, scan=scan))).lower(kernels, x).compile()


def test_the_compilers_bytes_where_there_is_no_loop():
    program = compiled(jax.grad, scan=False)
    count = program.cost_analysis()["bytes accessed"]
    assert traffic(program.as_text()).moved == pytest.approx(count, rel=0.02)


def test_a_loop_moves_what_its_turns_move():
    """Each turn as much: a kernel read, x read and written, and at most four times that."""
    moved = [
        traffic(compiled(lambda loss: loss, scan=True, depth=depth).as_text()).moved
        for depth in (6, 12, 24)
    ]
    each = (moved[1] - moved[0]) / 6
    assert moved[2] - moved[1] == pytest.approx(12 * each, rel=1e-3)
    least = 4 * (128 * 128 + 2 * 256 * 128)
    assert least <= each <= 4 * least


@pytest.mark.parametrize("scan", [False, True])
def test_products_count_as_often_as_they_run(scan):
    """One of 256 x 128 x 128 in each of six layers, in a loop or not."""
    program = compiled(lambda loss: loss, scan=scan)
    assert traffic(program.as_text()).products == 6 * 2 * 256 * 128 * 128


def test_of_a_conditional_the_cheaper_products_count():
    a = jnp.ones((64, 64))
    fn = jax.jit(lambda a, many: jax.lax.cond(many, lambda: a @ a @ a @ a, lambda: a @ a))
    text = fn.lower(a, True).compile().as_text()
    assert traffic(text).products == 2 * 64**3


def test_of_a_likely_conditional_the_costlier_products_count():
    a = jnp.ones((64, 64))

    def fn(a, good):
        with jax.named_scope(LIKELY):
            return jax.lax.cond(good, lambda: a @ a @ a @ a, lambda: a)

    text = jax.jit(fn).lower(a, True).compile().as_text()
    assert traffic(text).products == 3 * 2 * 64**3


@pytest.mark.parametrize(("said", "runs"), [(7, 7), (0, 0), (None, 2)])
def test_a_loop_runs_as_often_as_its_scope_says(said, runs):
    """And a loop in it as often as it states itself; without a scope the data's number is given.

    Of one size each: a program is found in the cache whatever its scopes are.
    """
    side = 5 + runs

    def often(x, n):
        turn = lambda i, x: jax.lax.fori_loop(0, 3, lambda j, x: x @ x, x)  # noqa: E731
        with contextlib.nullcontext() if said is None else turns(said):
            return jax.lax.fori_loop(0, n, turn, x)

    text = jax.jit(often).lower(jnp.ones((side, side)), 5).compile().as_text()
    assert traffic(text, 2).products == runs * 3 * 2 * side**3


@pytest.mark.optimized
def test_a_convolution_counts_two_for_each_weight_and_pixel():
    """8 x 8 pixels with 3 x 3 x 5 x 7 weights, those that meet zeros outside of the image too."""
    dims = ("NHWC", "HWIO", "NHWC")
    apply = jax.jit(
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
    )
    text = apply.lower(jnp.ones((2, 8, 8, 5)), jnp.ones((3, 3, 5, 7))).compile().as_text()
    assert traffic(text).products == 2 * 2 * 64 * 9 * 5 * 7
