"""The 19 corruptions: what all have in common, and the effect that each is known for."""

import numpy as np
import pytest

from fedbench.corruptions import CORRUPTIONS, _affine_sources, _moved, corrupt

DRAWN = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow", "frost")
DRAWN += ("fog", "spatter", "elastic_transform")
"""Those that need random numbers."""


def rng(seed=0):
    return np.random.default_rng(seed)


def noise(n=4, height=32, width=32):
    """Images in which every pixel is drawn by itself, none of them black or white."""
    return rng(7).integers(10, 246, (n, height, width, 3), dtype=np.uint8)


def flat(*colour, n=4, height=32, width=32):
    """Images of one colour."""
    return np.broadcast_to(np.array(colour, dtype=np.uint8), (n, height, width, 3)).copy()


def spot(value=255):
    """A black image with one bright pixel at row 16, column 20."""
    image = flat(0, n=1)
    image[0, 16, 20] = value
    return image


def steps(images):
    """Mean difference of neighbouring pixels."""
    x = images.astype(float)
    return np.abs(np.diff(x, axis=1)).mean() + np.abs(np.diff(x, axis=2)).mean()


# --- what all have in common ---


def test_there_are_the_authors_nineteen_in_their_order():
    assert len(CORRUPTIONS) == 19
    assert [*CORRUPTIONS][:3] == ["gaussian_noise", "shot_noise", "impulse_noise"]
    assert [*CORRUPTIONS][-4:] == ["speckle_noise", "gaussian_blur", "spatter", "saturate"]


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("sides", [(32, 32), (8, 8), (9, 17), (40, 24)])
def test_every_corruption_changes_every_image_and_keeps_shape_and_type(name, sides):
    images = noise(3, *sides)
    before = images.copy()

    made = corrupt(name, images, rng())

    assert (made.shape, made.dtype) == (images.shape, np.uint8)
    assert (made != images).any(axis=(1, 2, 3)).all()
    assert np.array_equal(images, before)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_same_generator_makes_the_same_images(name):
    assert np.array_equal(corrupt(name, noise(), rng(3)), corrupt(name, noise(), rng(3)))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_another_generator_makes_other_images_where_something_is_drawn(name):
    one, other = (corrupt(name, noise(), rng(seed)) for seed in (0, 1))

    assert (one != other).any(axis=(1, 2, 3)).tolist() == [name in DRAWN] * 4


@pytest.mark.parametrize("name", DRAWN)
def test_images_of_a_batch_are_not_corrupted_alike(name):
    first, second, *_ = corrupt(name, np.repeat(noise(1), 2, axis=0), rng())

    assert (first != second).any()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_what_becomes_of_an_image_does_not_depend_on_the_others(name):
    images, changed = noise(), noise()
    changed[:2] = np.array([0, 255], dtype=np.uint8)[:, None, None, None]

    assert np.array_equal(corrupt(name, images, rng())[2:], corrupt(name, changed, rng())[2:])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_memory_map_in_another_order_of_axes_is_as_good(name):
    images = noise()
    turned = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)

    assert np.array_equal(corrupt(name, images, rng()), corrupt(name, turned, rng()))


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 32, 32, 1), dtype=np.uint8),
        np.zeros((32, 32, 3), dtype=np.uint8),
        np.zeros((2, 7, 32, 3), dtype=np.uint8),
        np.zeros((2, 32, 32, 3)),
    ],
    ids=["grey", "a single one", "too small", "no bytes"],
)
def test_what_is_no_batch_of_colour_images_is_refused(images):
    with pytest.raises(ValueError, match="corruptions need bytes"):
        corrupt("fog", images, rng())


# --- noise: on grey of 128 nothing is clipped ---


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("gaussian_noise", 25.5),  # 0.1 * 255
        ("shot_noise", 25.55),  # sqrt(50 * 128/255) / 50 * 255
        ("speckle_noise", 25.6),  # 0.2 * 128
    ],
)
def test_noise_has_the_deviation_of_its_constant(name, deviation):
    made = corrupt(name, flat(128, n=40), rng()).astype(float)

    assert made.std() == pytest.approx(deviation, rel=0.01)
    assert made.mean() == pytest.approx(127.5, abs=0.3)  # 128, rounded down


def test_shot_noise_counts_photons():
    made = corrupt("shot_noise", flat(128, n=40), rng())

    # a count k of 50 is the byte floor(255 k / 50)
    assert set(made.ravel()) <= {255 * count // 50 for count in range(51)}


def test_there_is_no_shot_noise_in_the_dark():
    assert corrupt("shot_noise", flat(0), rng()).max() == 0


def test_shot_noise_has_poissons_probabilities():
    made = corrupt("shot_noise", flat(5, n=100), rng())

    # mean 50 * 5/255 = 0.98: exp(-0.98) = 0.375 have no photon, 0.98 of that one
    assert (made == 0).mean() == pytest.approx(0.375, abs=0.003)
    assert (made == 5).mean() == pytest.approx(0.368, abs=0.003)


def test_impulse_noise_makes_7_percent_of_the_values_black_or_white():
    made = corrupt("impulse_noise", flat(128, n=40), rng())

    assert (made == 255).mean() == pytest.approx(0.035, abs=0.002)
    assert (made == 0).mean() == pytest.approx(0.035, abs=0.002)
    assert (made == 128).mean() == pytest.approx(0.93, abs=0.003)


def test_speckle_noise_is_stronger_where_it_is_bright():
    dark, bright = (corrupt("speckle_noise", flat(value, n=20), rng()).astype(float).std() for value in (40, 120))

    assert bright / dark == pytest.approx(3, rel=0.03)


# --- blur ---


@pytest.mark.parametrize(
    "name", ["defocus_blur", "gaussian_blur", "motion_blur", "zoom_blur", "glass_blur", "elastic_transform"]
)
def test_blur_makes_neighbours_alike_and_leaves_one_colour_alone(name):
    assert steps(corrupt(name, noise(), rng())) < 0.85 * steps(noise())
    grey = corrupt(name, flat(90, 150, 210), rng()).astype(int)
    assert np.abs(grey - flat(90, 150, 210)).max() <= 1


def test_defocus_spreads_a_spot_over_a_disk_of_nine_pixels():
    made = corrupt("defocus_blur", spot(), rng())[0, :, :, 0]

    assert (made[15:18, 19:22] == 28).all()  # 255 / 9 = 28.3
    assert (made > 0).sum() == 9


def test_gaussian_blur_spreads_a_spot_by_a_bell_of_deviation_one():
    made = corrupt("gaussian_blur", spot(), rng())[0, :, :, 0]

    # 255 / (2 pi) = 40.6, and exp(-1/2) = 0.607 of it beside
    assert (made[16, 20], made[16, 21], made[15, 20]) == (40, 24, 24)


def test_motion_blur_drags_a_spot_along_a_line():
    made = _moved(spot().astype(float), radius=9, sigma=2.5, angles=np.array([0.0]))[0, :, :, 0]

    # weights exp(-i^2 / 12.5) for i = 0..18, sum 3.633: 255 / 3.633 = 70.2, of which 0.923, 0.726 and 0.487 follow
    assert made[16, 17:22].tolist() == [34, 51, 65, 70, 0]
    assert made[:16].max() == made[17:].max() == 0


def test_motion_blur_has_an_angle_for_every_image():
    images = np.repeat(spot(), 2, axis=0).astype(float)

    made = _moved(images, radius=9, sigma=2.5, angles=np.array([90.0, 45.0]))[..., 0]

    assert made[0, 13:18, 20].tolist() == [34, 51, 65, 70, 0]
    # at 45 degrees the steps 1, 2 and 3 are 1, 1 and 2 pixels in both directions
    assert (made[1, 16, 20], made[1, 15, 19]) == (70, 116)  # 70.2 * (0.923 + 0.726) = 115.7


def test_glass_lets_pixels_come_from_above_and_from_the_left_only():
    image = flat(0, n=20)
    image[:, :, 16:] = 200

    made = corrupt("glass_blur", image, rng())[..., 0]

    # the border moves right by up to one pixel each time; blurring twice by 0.4 reaches 4 pixels left
    assert made[:, :, :12].max() == 0
    assert made[:, 2:30, 14].max() < 20
    assert made[:, 2:30, 17].min() < 20 < 180 < made[:, 2:30, 17].max()
    assert made[:, :, 24:].min() >= 199


def test_zoom_enlarges_around_the_middle():
    image = flat(0, n=1)
    image[0, :, 22:] = 250

    made = corrupt("zoom_blur", image, rng())[0, :, :, 0].astype(int)

    # the edge at 22 moves outward, to 15.5 + 1.26 * 6.5 = 23.7 at most
    assert made[5, 21] <= 1
    assert 40 < made[5, 22] < made[5, 23] < 250
    assert made[5, 25:].min() >= 248


def test_elastic_maps_are_the_identity_where_no_point_moves_and_move_along_with_all():
    corners = np.array([[26.0, 26], [26, 6], [6, 6]])
    y, x = np.mgrid[:32, :32].astype(float)

    found = _affine_sources(corners, np.stack([corners, corners + np.array([2, -1])]), x, y)

    assert np.allclose(found[0], np.stack([x, x - 2]))
    assert np.allclose(found[1], np.stack([y, y + 1]))


def test_elastic_moves_pixels_by_a_few_pixels():
    image = flat(0, n=30)
    image[:, 12:20, 12:20] = 240

    made = corrupt("elastic_transform", image, rng())[..., 0]

    assert made[:, 14:18, 14:18].mean() > 200
    assert made[:, :6].max() == made[:, :, :6].max() == 0
    assert (made != image[..., 0]).any(axis=(1, 2)).all()


# --- weather ---


def test_snow_whitens_a_black_image_and_lets_flakes_fall():
    made = corrupt("snow", flat(0, n=20), rng())

    # without flakes 0.2 * 0.5 = 0.1 of white
    assert made.min() == 25
    assert (made > 40).any(axis=(1, 2, 3)).all()
    assert (made[..., 0] == made[..., 2]).all()


def test_snow_is_the_same_upside_down():
    made = corrupt("snow", flat(0, n=20), rng())

    assert np.array_equal(made, made[:, ::-1, ::-1])


def test_frost_darkens_the_image_by_a_quarter_and_adds_less_than_half_of_ice():
    made = corrupt("frost", flat(100, n=50), rng())

    assert made.min() >= 75
    assert made.max() <= 75 + 115  # 0.45 * 255 = 114.75
    assert made.astype(float).std() > 15
    assert made[..., 2].mean() > made[..., 0].mean()  # ice is blue


def test_fog_covers_white_with_all_heights_of_a_fractal():
    made = corrupt("fog", flat(255, n=5), rng())

    # (1 + 1.5 h) / 2.5 for heights h from 0 to 1
    assert made.min(axis=(1, 2, 3)).tolist() == [102] * 5
    assert made.max(axis=(1, 2, 3)).tolist() == [255] * 5


def test_fog_takes_contrast_away():
    assert corrupt("fog", noise(), rng()).std() < 0.8 * noise().std()


def test_mud_is_brown_and_hides_most_of_what_is_below():
    made = corrupt("spatter", flat(255, n=40), rng())
    hit = made[..., 0] < 255

    # at least 0.8 of mud: 0.2 * 255 + 0.8 * 63 = 101.4
    assert 0.02 < hit.mean() < 0.2
    assert made[..., 0][hit].max() <= 101
    assert (made[hit][:, 0] > made[hit][:, 2]).all()


# --- colours ---


def test_brightness_adds_to_the_value_and_keeps_hue_and_saturation():
    made = corrupt("brightness", np.stack([flat(100, 50, 0, n=1)[0], flat(0, n=1)[0], flat(250, 25, 0, n=1)[0]]), rng())

    # value 100 + 76.5 = 176.5, a factor of 1.765; black becomes grey; 250 stops at 255, a factor of 1.02
    assert made[:, 0, 0].tolist() == [[176, 88, 0], [76, 76, 76], [255, 25, 0]]


def test_saturation_grows_and_grey_turns_reddish():
    colours = [(200, 100, 100), (200, 180, 190), (100, 100, 100), (0, 0, 0)]
    made = corrupt("saturate", np.stack([flat(*colour, n=1)[0] for colour in colours]), rng())

    # saturation 0.5 -> 1.45, at most 1; 0.1 -> 0.45, distances to the value times 4.5; 0 -> 0.2 with hue 0
    expected = [[200, 0, 0], [200, 110, 155], [100, 80, 80], [0, 0, 0]]
    assert np.abs(made[:, 0, 0].astype(int) - expected).max() <= 1  # rounded down


def test_contrast_leaves_the_mean_and_15_percent_of_the_deviation():
    images = noise()

    made = corrupt("contrast", images, rng()).astype(float)

    assert made.mean() == pytest.approx(images.mean() - 0.5, abs=0.1)  # rounded down
    assert made.std() == pytest.approx(0.15 * images.std(), rel=0.02)


# --- digital ---


def test_pixelate_leaves_20_of_32_rows_and_columns():
    made = corrupt("pixelate", noise(), rng())

    for axis in (1, 2):
        same = (np.diff(made.astype(int), axis=axis) == 0).all(axis=(0, 3 - axis, 3))
        assert same.sum() == 12  # 32 - int(0.65 * 32)


def test_pixelate_takes_means():
    made = corrupt("pixelate", noise(50), rng())

    assert made.mean() == pytest.approx(noise(50).mean(), abs=1)


def test_jpeg_spares_one_colour_and_spoils_noise():
    assert np.abs(corrupt("jpeg_compression", flat(90, 150, 210), rng()).astype(int) - flat(90, 150, 210)).max() <= 3
    assert np.abs(corrupt("jpeg_compression", noise(), rng()).astype(int) - noise()).mean() > 20


def test_jpeg_keeps_colours_in_their_channels():
    made = corrupt("jpeg_compression", flat(250, 10, 60), rng())

    assert np.abs(made.mean(axis=(0, 1, 2)) - [250, 10, 60]).max() < 4
