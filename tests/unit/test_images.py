"""Pixels on their way to the network: scaling by name, random crops and mirrors in training, and nothing else."""

from itertools import product

import pytest
import torch

from fedbench.images import NORMALISATIONS, ClientData, Images
from fedbench.rng import torch_rng

HEIGHT, WIDTH = 5, 6
"""More than 4 pixels a side: every crop from the frame shows a piece of the image, which tells where it was cut."""
OFFSETS = range(9)
"""Of a crop in an image framed by 4 pixels on each side."""


def rng(seed=0):
    return torch_rng(seed, "batches", 1, 0, torch.device("cpu"))


def colourful():
    """An image of three channels whose 90 bytes all differ, and are not black."""
    return torch.arange(1, 3 * HEIGHT * WIDTH + 1, dtype=torch.uint8).view(3, HEIGHT, WIDTH)


def crops(image):
    """Every crop of the framed image, plain and mirrored: bytes -> (top, left, mirrored)."""
    framed = torch.zeros(3, HEIGHT + 8, WIDTH + 8, dtype=torch.uint8)
    framed[:, 4 : 4 + HEIGHT, 4 : 4 + WIDTH] = image
    found = {}
    for top, left, mirrored in product(OFFSETS, OFFSETS, (False, True)):
        crop = framed[:, top : top + HEIGHT, left : left + WIDTH]
        found[(crop.flip(-1) if mirrored else crop).numpy().tobytes()] = (top, left, mirrored)
    return found


def augmented(x, n, seed=0):
    """The first image n times, augmented; back on the scale of bytes."""
    images = Images(x, 255, "half", "crop_flip")
    # half is v / 127.5 - 1
    return ((images.augmented(torch.zeros(n, dtype=torch.long), rng(seed)) + 1) * 127.5).round().to(torch.uint8)


# --- scaling ---

SCALED = {
    # name: what byte 0 and byte 255 become, channel by channel: -mean / std, (1 - mean) / std
    "none": ([0, 0, 0], [1, 1, 1]),
    "half": ([-1, -1, -1], [1, 1, 1]),
    "mnist": ([-0.424213] * 3, [2.821487] * 3),  # -0.1307 / 0.3081, 0.8693 / 0.3081
    # -0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225; 0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225
    "imagenet": ([-2.117904, -2.035714, -1.804444], [2.248908, 2.428571, 2.64]),
    # -0.507 / 0.267, -0.487 / 0.256, -0.441 / 0.276; 0.493 / 0.267, 0.513 / 0.256, 0.559 / 0.276
    "cifar100": ([-1.898876, -1.902344, -1.597826], [1.846442, 2.003906, 2.025362]),
}


def test_every_scaling_that_ships_is_checked_here():
    assert SCALED.keys() == NORMALISATIONS.keys()


@pytest.mark.parametrize("name", SCALED)
def test_black_and_white_become_what_the_scaling_says(name):
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1)

    black, white = Images(black_and_white, 255, name)[torch.tensor([0, 1])].flatten(1).tolist()

    assert black == pytest.approx(SCALED[name][0], abs=1e-5)
    assert white == pytest.approx(SCALED[name][1], abs=1e-5)


@pytest.mark.parametrize("name", SCALED)
def test_scaling_is_linear_between_black_and_white(name):
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 1, 1)

    black, fifth, white = Images(x, 255, name)[torch.arange(3)]

    # 51 / 255 = 1/5
    torch.testing.assert_close(fifth, black + (white - black) / 5, rtol=0, atol=1e-5)


def test_images_come_as_float32_in_the_order_asked_for():
    x = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1, 1)

    found = Images(x, 10, "none")[torch.tensor([2, 0, 2])]

    assert found.dtype == torch.float32
    assert found.flatten().tolist() == pytest.approx([3, 1, 3])


# --- tables ---


def test_a_table_of_numbers_passes_through_as_it_is():
    table = torch.tensor([[-1.5, 1e6], [0.1, 3e-8]]).view(2, 1, 1, 2)

    found = Images(table, 1, "none")[torch.tensor([1, 0])]

    assert torch.equal(found, table.flip(0))


def test_what_is_done_to_numbers_of_a_table_does_not_reach_the_table():
    table = torch.ones(2, 1, 1, 3)

    Images(table, 1, "none")[torch.tensor([0, 1])].zero_()
    ClientData(Images(table, 1, "none"), torch.zeros(2), torch.arange(2)).x.zero_()

    assert torch.equal(table, torch.ones(2, 1, 1, 3))


def test_a_table_can_be_scaled():
    table = torch.tensor([1.0, 4.0]).view(2, 1, 1, 1)

    # (v / 2 - 0.5) / 0.5
    assert Images(table, 2, "half")[torch.arange(2)].flatten().tolist() == pytest.approx([0, 3])
    assert table.flatten().tolist() == [1, 4]


# --- random crops and mirrors ---


def test_every_augmented_image_is_a_crop_of_the_framed_one_perhaps_mirrored():
    image = colourful()
    possible = crops(image)
    assert len(possible) == 9 * 9 * 2  # all different: a crop tells where it was cut

    found = augmented(image[None], 500)

    assert found.shape == (500, 3, HEIGHT, WIDTH)
    assert {crop.numpy().tobytes() for crop in found} <= possible.keys()


def test_all_crops_and_mirrors_occur_about_equally_often():
    possible = crops(colourful())

    found = [possible[crop.numpy().tobytes()] for crop in augmented(colourful()[None], 16_200)]

    # 100 of each of the 162 on average, with a standard deviation of 10
    counts = [found.count(way) for way in possible.values()]
    assert min(counts) > 50
    assert max(counts) < 150


def test_crops_across_and_down_are_drawn_apart():
    possible = crops(colourful())

    found = [possible[crop.numpy().tobytes()] for crop in augmented(colourful()[None], 2000)]

    same = sum(top == left for top, left, _ in found)
    # one in nine: 222, with a standard deviation of 14
    assert 150 < same < 300


def test_the_frame_is_black_before_scaling():
    # a white image: after `half`, white is 1 and the frame -1
    white = torch.full((1, 1, 5, 5), 255, dtype=torch.uint8)

    found = Images(white, 255, "half", "crop_flip").augmented(torch.zeros(200, dtype=torch.long), rng())

    assert found.unique().tolist() == [-1.0, 1.0]


def test_every_image_of_a_batch_has_its_own_crop():
    ways = {crop.numpy().tobytes() for crop in augmented(colourful()[None], 20)}

    assert len(ways) > 10


def test_an_augmented_image_is_made_from_the_image_at_its_position():
    one, other = colourful(), colourful() + 100
    images = Images(torch.stack([one, other]), 255, "none", "crop_flip")

    found = (images.augmented(torch.tensor([1, 0, 1]), rng()) * 255).round().to(torch.uint8)

    for crop, image in zip(found, (other, one, other), strict=True):
        assert crop.numpy().tobytes() in crops(image)


def test_the_generator_decides_how_images_are_augmented():
    first, again, other = (augmented(colourful()[None], 50, seed) for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_augmentation_leaves_the_stored_bytes_alone():
    x = colourful()[None]

    augmented(x, 50)

    assert torch.equal(x, colourful()[None])


def test_augmentation_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()

    augmented(colourful()[None], 50)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_table_of_one_row_can_be_cropped_too():
    table = torch.arange(1.0, 7.0).view(1, 1, 1, 6)

    found = Images(table, 1, "none", "crop_flip").augmented(torch.zeros(500, dtype=torch.long), rng())

    # a row of height 1 is hit by one of nine crops; numbers come through untouched, zeros from the frame
    assert found.dtype == torch.float32
    assert set(found.unique().tolist()) == {0, 1, 2, 3, 4, 5, 6}


# --- where images are augmented ---


def client(augment, n=12):
    x = torch.randint(1, 256, (n, 3, HEIGHT, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ClientData(Images(x, 255, "half", augment), torch.arange(n), torch.arange(n))


def test_training_batches_are_augmented_if_the_task_says_so():
    plain, changed = (torch.cat([x for x, _ in client(a).batches(4, rng(), epochs=1)]) for a in ("none", "crop_flip"))

    assert plain.shape == changed.shape
    assert not torch.equal(plain, changed)


def test_training_batches_are_not_augmented_otherwise():
    data = client("none")

    for x, y in data.batches(4, rng(), epochs=2):
        assert torch.equal(x, data.x[y])  # the label of an image is its position


def test_every_pass_augments_anew():
    (first, order), (second, other_order) = client("crop_flip").batches(12, rng(), epochs=2)

    assert not torch.equal(first[order.argsort()], second[other_order.argsort()])


def test_an_augmented_image_keeps_its_label():
    x = torch.stack([colourful(), colourful() + 100])
    data = ClientData(Images(x, 255, "none", "crop_flip"), torch.tensor([7, 8]), torch.tensor([0, 1]))

    for batch, labels in data.batches(2, rng(), epochs=10):
        for image, label in zip((batch * 255).round().to(torch.uint8), labels.tolist(), strict=True):
            assert image.numpy().tobytes() in crops(x[label - 7])


def test_augmented_batches_follow_from_the_generator():
    def batches(seed):
        return torch.cat([x for x, _ in client("crop_flip").batches(4, rng(seed), epochs=2)])

    assert torch.equal(batches(0), batches(0))
    assert not torch.equal(batches(0), batches(1))


def test_evaluation_sees_images_as_they_are():
    plain, changed = client("none"), client("crop_flip")

    assert torch.equal(changed.x, plain.x)
    for (x, y), (expected, labels) in zip(changed.chunks(5), plain.chunks(5), strict=True):
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)


def test_a_task_augments_its_training_batches_and_no_others(make_ctx, pictures):
    plain, changed = (
        make_ctx(dataset=pictures, model="vgg_s", augment=augment).task for augment in ("none", "crop_flip")
    )

    for part in ("train_data", "test_data"):
        assert torch.equal(getattr(changed, part)(0).x, getattr(plain, part)(0).x), part
    batches = [torch.cat([x for x, _ in task.train_data(0).batches(4, rng(), epochs=1)]) for task in (plain, changed)]
    assert not torch.equal(*batches)


@pytest.mark.parametrize("other", ["clean", "ood"])
def test_images_from_elsewhere_are_never_augmented(make_ctx, pictures, other):
    task = make_ctx(dataset=pictures, model="vgg_s", augment="crop_flip", **{other: pictures}).task
    data = task.clean_data() if other == "clean" else task.ood_data(0)

    (x, y) = next(data.batches(data.n, rng(), epochs=1))

    # the same images in another order: no pixel was lost to a crop
    assert data.n > 0
    assert torch.equal(x.flatten(1).sum(1).sort().values, data.x.flatten(1).sum(1).sort().values)
    assert torch.equal(y.sort().values, data.y.sort().values)
