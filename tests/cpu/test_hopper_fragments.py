"""The kernels' index maps, lane by lane with PTX's documented fragment layouts, and exp2_fma step by step."""

import numpy as np
import torch

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
PAIR = np.array([0, 1])


def ldmatrix4(rows: np.ndarray, column: int, transposed: bool) -> np.ndarray:
    """Bytes [32 lanes, 4 registers, 4]. Lane i names row i % 16, 16 bytes from column + 16 * (i // 16) on."""
    out = np.zeros((32, 4, 4), np.uint8)
    for r in range(4):
        matrix = np.stack(
            [rows[i % 16, column + 16 * (i // 16) :][:16].reshape(8, 2) for i in range(8 * r, 8 * r + 8)]
        )
        if transposed:
            out[:, r, :2], out[:, r, 2:] = matrix[2 * T, G], matrix[2 * T + 1, G]
        else:
            out[:, r] = matrix[G][LANES[:, None], 2 * T[:, None] + PAIR].reshape(32, 4)
    return out


def widen(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [32, 4] to two FP16 pairs [32, 2]."""
    wide = torch.from_numpy(x.copy()).view(torch.float8_e4m3fn).to(torch.float16).numpy()
    return wide[:, :2], wide[:, 2:]


def mma(c: np.ndarray, a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    """m16n8k16 on fragments: c [32, 4], a four and b two pairs [32, 2]."""
    wide_a, wide_b = np.zeros((16, 16)), np.zeros((16, 8))
    for i, (row, k) in enumerate([(G, 2 * T), (G + 8, 2 * T), (G, 2 * T + 8), (G + 8, 2 * T + 8)]):
        for e in range(2):
            wide_a[row, k + e] = a[i][:, e]
    for i in range(2):
        for e in range(2):
            wide_b[2 * T + 8 * i + e, G] = b[i][:, e]
    full = wide_a @ wide_b
    return c + np.stack([full[G, 2 * T], full[G, 2 * T + 1], full[G + 8, 2 * T], full[G + 8, 2 * T + 1]], 1)


def transpose8(x: np.ndarray) -> np.ndarray:
    matrix = np.zeros((8, 8))
    matrix[G, 2 * T], matrix[G, 2 * T + 1] = x[:, 0], x[:, 1]
    return np.stack([matrix.T[G, 2 * T], matrix.T[G, 2 * T + 1]], 1)


def fp8_rows(rng: np.random.Generator, columns: int) -> tuple[np.ndarray, np.ndarray]:
    value = torch.from_numpy(rng.standard_normal((16, columns)).astype(np.float32)).to(torch.float8_e4m3fn)
    return value.view(torch.uint8).numpy(), value.to(torch.float64).numpy()


def test_logits_are_tokens_by_heads() -> None:
    rng = np.random.default_rng(0)
    rows, k = fp8_rows(rng, 32)
    q = rng.integers(-8, 8, (8, 32)).astype(np.float64)
    c = np.zeros((32, 4))
    r = ldmatrix4(rows, 0, transposed=False)
    for piece in range(2):
        a0, a2 = widen(r[:, 2 * piece])
        a1, a3 = widen(r[:, 2 * piece + 1])
        dims = 16 * piece + 4 * T[:, None]
        b = [q[G[:, None], dims + PAIR], q[G[:, None], dims + 2 + PAIR]]
        c = mma(c, [a0, a1, a2, a3], b)
    want = k @ q.T
    np.testing.assert_array_equal(c[:, 0], want[G, 2 * T])
    np.testing.assert_array_equal(c[:, 3], want[G + 8, 2 * T + 1])


def test_output_is_dims_by_heads() -> None:
    rng = np.random.default_rng(1)
    rows, v = fp8_rows(rng, 32)
    weights = rng.integers(0, 9, (16, 8)).astype(np.float64)  # [tokens, heads], as logits come out
    b = [transpose8(weights[(G + h)[:, None], 2 * T[:, None] + PAIR]) for h in (0, 8)]
    r = ldmatrix4(rows, 0, transposed=True)[:, :, [0, 2, 1, 3]]  # prmt 0x3120
    want = v.T @ weights
    for piece in range(2):
        a0, a1 = widen(r[:, 2 * piece])
        a2, a3 = widen(r[:, 2 * piece + 1])
        c = mma(np.zeros((32, 4)), [a0, a1, a2, a3], b)
        dim = 16 * piece + 2 * G
        for register, (d, head) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            np.testing.assert_array_equal(c[:, register], want[dim + d, 2 * T + head])


def exp2_fma(x: np.ndarray) -> np.ndarray:
    """mla_many_heads.cu's, each step rounded to float32 (products of two are exact in float64)."""
    one, magic = np.float32(1), np.float32(1.5 * 2**23)
    c = np.maximum(x, np.float32(-127))  # NaN of NaN, as max.NaN
    t = c + magic
    f = c - (t - magic)
    p = np.full_like(x, np.array(0x3C1D0166, np.uint32).view(np.float32))
    for bits in (0x3D64FE23, 0x3E7601BC, 0x3F317096, 0x3F800000):
        p = (p.astype(np.float64) * f + np.array(bits, np.uint32).view(np.float32)).astype(np.float32)
    scale = ((t.view(np.uint32) << np.uint32(23)) + one.view(np.uint32)).view(np.float32)
    return p * scale


def test_exponentials_by_fma() -> None:
    x = np.linspace(-126, 15, 200_001, dtype=np.float32)
    got, want = exp2_fma(x).astype(np.float64), np.exp2(x.astype(np.float64))
    assert np.abs(got / want - 1).max() < 3e-6
    np.testing.assert_array_equal(
        exp2_fma(np.arange(-126, 16, dtype=np.float32)), np.exp2(np.arange(-126.0, 16))
    )
    edge = exp2_fma(np.array([-np.inf, -1e30, -128, -127, np.nan], np.float32))
    np.testing.assert_array_equal(edge, [0, 0, 0, 0, np.nan])
