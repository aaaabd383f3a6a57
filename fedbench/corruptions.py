"""The 19 common corruptions of CIFAR-10-C and CIFAR-100-C at severity 5, the strongest (Hendrycks, Dietterich 2019).

A corruption is a pure function: images as bytes [n, height, width, 3] and a generator in, images of the same shape out.
All draws have sizes that do not depend on pixels: what becomes of an image depends on its place in the batch and on the
batch's length, never on the other images.

Steps and constants are those of the authors' program for images of 32x32 pixels; sizes in pixels stay as they are for
other images, but for `elastic_transform`, whose constants are parts of the side. What is different: random streams;
`frost`, whose photographs are not ours to ship (see there); and `elastic_transform`, which reads between pixels
exactly where the OpenCV of that time rounds to 1/32 of a pixel. Motion blur is ImageMagick's, written out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from scipy.special import pdtr

from fedbench.rng import numpy_rng

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Corruption = Callable[[Bytes, np.random.Generator], Bytes]

SMALLEST = 8
"""Pixels of a side below which the corruptions mean nothing."""


def corrupt(name: str, images: Bytes, rng: np.random.Generator) -> Bytes:
    """The images under the corruption of that name; raises ValueError for what is no batch of colour images."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or min(images.shape[1:3]) < SMALLEST:
        raise ValueError(
            f"corruptions need bytes [n, height, width, 3] with sides of at least {SMALLEST} pixels, "
            f"not {images.dtype} {list(images.shape)}"
        )
    return CORRUPTIONS[name](images, rng)


# --- noise ---


def gaussian_noise(images: Bytes, rng: np.random.Generator) -> Bytes:
    return _bytes(_floats(images) + rng.normal(scale=0.1, size=images.shape))


def shot_noise(images: Bytes, rng: np.random.Generator) -> Bytes:
    """Poisson noise of a camera that counts 50 photons where a pixel is white."""
    photons, most = 50, 128
    # By inversion, one draw a pixel: `rng.poisson` takes as many as the pixels make it take. Every grey level has a row
    # of its distribution function, raised by the level, so that one search over all rows finds the counts.
    means = np.arange(256)[:, None] / 255 * photons
    rows = pdtr(np.arange(most), means) + np.arange(256)[:, None]
    level = images.astype(np.int64)
    found = np.searchsorted(rows.ravel(), level + rng.random(images.shape), side="right")
    return _bytes((found - most * level) / photons)


def impulse_noise(images: Bytes, rng: np.random.Generator) -> Bytes:
    """Salt and pepper: 7 of 100 values become 0 or 255, each colour by itself."""
    hit, salt = rng.random(images.shape) < 0.07, rng.random(images.shape) < 0.5
    return np.where(hit, np.where(salt, np.uint8(255), np.uint8(0)), images)


def speckle_noise(images: Bytes, rng: np.random.Generator) -> Bytes:
    return _bytes(_floats(images) * (1 + rng.normal(scale=0.2, size=images.shape)))


# --- blur ---


def gaussian_blur(images: Bytes, rng: np.random.Generator) -> Bytes:
    return _bytes(_smooth(_floats(images), 1.0))


def defocus_blur(images: Bytes, rng: np.random.Generator) -> Bytes:
    """Mean over a disk of radius 1.5. (The authors smooth its edge by a Gaussian of deviation 0.1: by nothing.)"""
    y, x = np.mgrid[-1:2, -1:2]
    disk = (y**2 + x**2 <= 1.5**2).astype(np.float64)
    return _bytes(ndimage.convolve(_floats(images), (disk / disk.sum())[None, :, :, None], mode="mirror"))


def glass_blur(images: Bytes, rng: np.random.Generator) -> Bytes:
    """Twice every pixel, but for the first two rows and columns, takes the value of a neighbour or keeps its own.

    The neighbours are above, left, and above left. The authors' program means to exchange the two pixels; its
    assignment of views copies one of them, and that is what it makes.
    """
    n, height, width, _ = images.shape
    x = _bytes(_smooth(_floats(images), 0.4))
    places = np.arange(height * width).reshape(height, width)
    inner = (places >= 2 * width) & (places % width >= 2)
    for _ in range(2):
        up, left = rng.integers(0, 2, (2, n, height, width))
        source = (places - inner * (up * width + left)).reshape(n, -1, 1)
        x = np.take_along_axis(x.reshape(n, -1, 3), source, axis=1).reshape(x.shape)
    return _bytes(_smooth(_floats(x), 0.4))


def motion_blur(images: Bytes, rng: np.random.Generator) -> Bytes:
    angles = rng.uniform(-45, 45, len(images))
    return _moved(images.astype(np.float64), radius=9, sigma=2.5, angles=angles).astype(np.uint8)


def zoom_blur(images: Bytes, rng: np.random.Generator) -> Bytes:
    """Mean of the image and its enlargements by 1, 1.01, ... 1.26."""
    n, height, width, _ = images.shape
    factors = np.arange(1, 1.26, 0.01)  # rounding lets 1.26 in, as in the authors' program
    x = np.ascontiguousarray(_floats(images).transpose(1, 2, 0, 3)).reshape(
        height, width, -1
    )  # side by side for matmul
    total = x.copy()
    for factor in factors:
        taller = (_zoom(height, factor) @ x.reshape(height, -1)).reshape(x.shape)
        total += _zoom(width, factor) @ taller
    return _bytes((total / (len(factors) + 1)).reshape(height, width, n, 3).transpose(2, 0, 1, 3))


# --- weather ---


def snow(images: Bytes, rng: np.random.Generator) -> Bytes:
    """Flakes that fall at an angle, in front of a whitened image; the same flakes upside down make them denser."""
    n, height, width, _ = images.shape
    flakes = rng.normal(0.3, 0.3, (n, height, width))
    angles = rng.uniform(-135, -45, (n,))
    flakes = _zoom(height, 1.25) @ flakes @ _zoom(width, 1.25).T
    flakes = _bytes(np.where(flakes < 0.65, 0, flakes))[..., None].astype(np.float64)
    layer = _moved(flakes, radius=14, sigma=12, angles=angles) / 255
    x = _floats(images)
    grey = (x @ np.array([0.299, 0.587, 0.114]))[..., None]
    white = 0.8 * x + 0.2 * np.maximum(x, 1.5 * grey + 0.5)
    return _bytes(white + layer + layer[:, ::-1, ::-1])


def frost(images: Bytes, rng: np.random.Generator) -> Bytes:
    """A random piece of one of five frosted panes over a darkened image.

    The authors' panes are photographs. Those here are drawn: needles of ice in several directions, denser in some
    places, blue-white on dark. This is the corruption that resembles its model least.
    """
    n, height, width, _ = images.shape
    panes = _panes(max(height, width))
    which = rng.integers(0, len(panes), (n,))
    top, left = (rng.integers(0, panes.shape[1] - side, (n,)) for side in (height, width))
    rows, columns = top[:, None] + np.arange(height), left[:, None] + np.arange(width)
    ice = panes[which[:, None, None], rows[:, :, None], columns[:, None, :]]
    return _bytes(0.75 * _floats(images) + 0.45 * ice)


def fog(images: Bytes, rng: np.random.Generator) -> Bytes:
    """A plasma fractal over the image, both scaled so that the image's brightest value stays."""
    n, height, width, _ = images.shape
    x, strength = _floats(images), 1.5
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    x = x + strength * _plasma(n, max(height, width), 1.75, rng)[:, :height, :width, None]
    return _bytes(x * brightest / (brightest + strength))


def spatter(images: Bytes, rng: np.random.Generator) -> Bytes:
    """Splashes of mud."""
    n, height, width, _ = images.shape
    wet = _smooth(rng.normal(0.65, 0.1, (n, height, width, 1)), 0.5) > 0.68
    mud = _smooth(wet.astype(np.float64), 0.6)
    mud[mud < 0.8] = 0
    brown = np.array([63, 42, 20]) / 255
    return _bytes(_floats(images) * (1 - mud) + brown * mud)


# --- colours ---


def brightness(images: Bytes, rng: np.random.Generator) -> Bytes:
    """The value of hue, saturation, value rises by 0.3."""
    x = _floats(images)
    value = x.max(axis=3, keepdims=True)
    brighter = np.minimum(value + 0.3, 1)
    return _bytes(np.where(value > 0, x * _ratio(brighter, value), brighter))


def saturate(images: Bytes, rng: np.random.Generator) -> Bytes:
    """The saturation of hue, saturation, value becomes 2.5 s + 0.2. Grey has hue 0, and turns reddish."""
    x = _floats(images)
    value = x.max(axis=3, keepdims=True)
    spread = value - x.min(axis=3, keepdims=True)
    wanted = np.minimum(2.5 * _ratio(spread, value) + 0.2, 1) * value
    below = np.where(spread > 0, (value - x) * _ratio(wanted, spread), wanted * np.array([0, 1, 1]))
    return _bytes(value - below)


def contrast(images: Bytes, rng: np.random.Generator) -> Bytes:
    """0.15 of every colour's distance to its mean is left."""
    x = _floats(images)
    mean = x.mean(axis=(1, 2), keepdims=True)
    return _bytes(mean + 0.15 * (x - mean))


# --- digital ---


def pixelate(images: Bytes, rng: np.random.Generator) -> Bytes:
    """65 of 100 pixels of a side are left, each as large as a box filter makes it."""
    height, width = images.shape[1:3]
    few, box = (int(0.65 * width), int(0.65 * height)), Image.Resampling.BOX
    made = [Image.fromarray(image).resize(few, box).resize((width, height), box) for image in images]
    return np.stack([np.asarray(image) for image in made]) if made else images.copy()


def jpeg_compression(images: Bytes, rng: np.random.Generator) -> Bytes:
    """Quality 40."""
    found = np.empty_like(images)
    for image, place in zip(images, found, strict=True):
        file = BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=40)
        with Image.open(file) as picture:
            place[:] = np.asarray(picture)
    return found


def elastic_transform(images: Bytes, rng: np.random.Generator) -> Bytes:
    """A random affine map near the identity, then a random displacement of every pixel that is smooth over pixels."""
    n, height, width, _ = images.shape
    side = min(height, width)
    shift, sigma, corner = 0.1 * side, 0.03 * side, 0.03 * side
    moved = rng.uniform(-corner, corner, (n, 3, 2))
    drift = rng.uniform(-1, 1, (2, n, height, width))
    middle = np.array([width // 2, height // 2], dtype=np.float64)
    arm = side // 3
    corners = middle + arm * np.array([[1, 1], [1, -1], [-1, -1]])
    rows, columns = np.mgrid[:height, :width].astype(np.float64)
    x, y = _affine_sources(corners, corners + moved, columns, rows)
    bent = _sampled(_floats(images), y, x, _mirror)
    down, right = shift * ndimage.gaussian_filter(drift, (0, 0, sigma, sigma), mode="reflect", truncate=3)
    return _bytes(_sampled(bent, rows + down, columns + right, _reflect))


CORRUPTIONS: dict[str, Corruption] = {
    corruption.__name__: corruption
    for corruption in (
        *(gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur),
        *(snow, frost, fog, brightness, contrast, elastic_transform, pixelate, jpeg_compression),
        *(speckle_noise, gaussian_blur, spatter, saturate),
    )
}
"""All of them by name, in the authors' order: 15, and 4 that they keep for validation."""


# --- what they share ---


def _floats(images: Bytes) -> Floats:
    return images / 255.0


def _bytes(x: Floats) -> Bytes:
    """Values in [0, 1] as bytes, rounded down as the authors do."""
    return (x.clip(0, 1) * 255).astype(np.uint8)


def _ratio(above: Floats, below: Floats) -> Floats:
    """The quotient; 0 where there is none."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _smooth(x: Floats, sigma: float) -> Floats:
    """Every image and colour convolved with a Gaussian."""
    smoothed: Floats = ndimage.gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest", truncate=4)
    return smoothed


def _zoom(side: int, factor: float) -> Floats:
    """The matrix that enlarges the middle of a row of pixels to the whole row, linearly."""
    kept = int(np.ceil(side / factor))
    enlarged = ndimage.zoom(np.eye(kept), (factor, 1), order=1)
    start, trim = (side - kept) // 2, (len(enlarged) - side) // 2
    matrix = np.zeros((side, side))
    matrix[:, start : start + kept] = enlarged[trim : trim + side]
    return matrix


def _moved(x: Floats, radius: int, sigma: float, angles: Floats) -> Floats:
    """ImageMagick's motion blur of values up to 255, in whole numbers: half a Gaussian along a line from every pixel.

    `angles` has one for every image, in degrees. Beyond its edge an image goes on as it ends.
    """
    n, height, width, _ = x.shape
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    along = np.deg2rad(angles)[:, None]
    down, right = (np.ceil(steps * part - 0.5).astype(np.int64) for part in (np.sin(along), np.cos(along)))
    image = np.arange(n)[:, None, None]
    blurred = np.zeros_like(x)
    for step, weight in enumerate(weights):
        rows = (np.arange(height) + down[:, step, None]).clip(0, height - 1)
        columns = (np.arange(width) + right[:, step, None]).clip(0, width - 1)
        blurred += weight * x[image, rows[:, :, None], columns[:, None, :]]
    return np.rint(blurred)


def _plasma(n: int, side: int, decay: float, rng: np.random.Generator) -> Floats:
    """Heights in [0, 1] by the diamond-square algorithm, periodic, [n, power of two of at least `side`, same].

    Every level's random part is `decay` squared smaller than that of the level before.
    """
    side = 1 << (side - 1).bit_length()
    heights = np.zeros((n, side, side))
    wibble, step = 100.0, side
    while step >= 2:
        corner, half = slice(None, None, step), slice(step // 2, None, step)
        corners = heights[:, corner, corner]
        pairs = corners + np.roll(corners, -1, axis=1)
        heights[:, half, half] = _wibbled(pairs + np.roll(pairs, -1, axis=2), wibble, rng)
        middles = heights[:, half, half]
        for rows, columns, across, along in ((corner, half, 1, 2), (half, corner, 2, 1)):
            ends = corners + np.roll(corners, -1, axis=along)
            heights[:, rows, columns] = _wibbled(ends + middles + np.roll(middles, 1, axis=across), wibble, rng)
        step //= 2
        wibble /= decay
    heights -= heights.min(axis=(1, 2), keepdims=True)
    heights /= heights.max(axis=(1, 2), keepdims=True)
    return heights


def _wibbled(sum_of_four: Floats, wibble: float, rng: np.random.Generator) -> Floats:
    """The mean of four heights and a random part; the authors multiply by `wibble` twice."""
    return sum_of_four / 4 + wibble * rng.uniform(-wibble, wibble, sum_of_four.shape)


@cache
def _panes(side: int) -> Floats:
    """Five frosted panes, [5, pixels, pixels, 3], always the same; large enough for many pieces of that side."""
    size, rng = max(160, 3 * side), numpy_rng(0, "frosted panes")
    panes = []
    for _ in range(5):
        needles = np.zeros((size, size))
        for angle in rng.uniform(0, 180, 6):
            grown = ndimage.gaussian_filter(rng.normal(size=(2 * size, 2 * size)), (0.6, 5), mode="wrap")
            turned = ndimage.rotate(grown / grown.std(), angle, reshape=False, order=1, mode="wrap")
            needles = np.maximum(needles, turned[size // 2 : size // 2 + size, size // 2 : size // 2 + size])
        density = ndimage.gaussian_filter(rng.normal(size=(size, size)), 12, mode="wrap")
        ice = (0.45 + 0.22 * density / density.std() + 0.25 * (needles - needles.mean()) / needles.std()).clip(0, 1)
        panes.append(ice[..., None] ** np.array([1.25, 1.05, 0.95]))
    return np.stack(panes)


def _affine_sources(before: Floats, after: Floats, x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Where the pixels of an image come from when an affine map takes three points `before` to those `after`.

    `before` is [3, 2], `after` [n, 3, 2], x before y; the results are [n, height, width].
    """
    three = np.c_[before, np.ones(3)]
    forward = np.linalg.solve(three, after).transpose(0, 2, 1)  # [n, 2, 3]
    back = np.linalg.inv(forward[:, :, :2])
    distance = np.stack([x, y])[None] - forward[:, :, 2, None, None]
    found = np.einsum("nij,njhw->nihw", back, distance)
    return found[:, 0], found[:, 1]


def _sampled(x: Floats, rows: Floats, columns: Floats, reflect: Callable[[Indices, int], Indices]) -> Floats:
    """The images at fractional positions [n, height, width], linearly between pixels; `reflect` finds those outside."""
    height, width = x.shape[1:3]
    image = np.arange(len(x))[:, None, None]
    top, left = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    down, right = (rows - top)[..., None], (columns - left)[..., None]

    def at(row: Indices, column: Indices) -> Floats:
        return x[image, reflect(row, height), reflect(column, width)]

    upper = at(top, left) * (1 - right) + at(top, left + 1) * right
    lower = at(top + 1, left) * (1 - right) + at(top + 1, left + 1) * right
    return upper * (1 - down) + lower * down


def _mirror(index: Indices, size: int) -> Indices:
    """d c b | a b c d | c b a"""
    inside = index % (2 * size - 2)
    return np.minimum(inside, 2 * size - 2 - inside)


def _reflect(index: Indices, size: int) -> Indices:
    """c b a | a b c d | d c b"""
    inside = index % (2 * size)
    return np.minimum(inside, 2 * size - 1 - inside)
