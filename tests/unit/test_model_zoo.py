"""Every model that ships, with every normalisation: its size, its shape, and its life on the flat buffer."""

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, conv2d, cross_entropy, relu

from fedbench.errors import FedbenchError
from fedbench.models import build_model, model_names
from fedbench.models.network import Network
from fedbench.models.resnet import BasicBlock
from fedbench.training import backward

CPU = torch.device("cpu")
GREY, COLOUR, TABLE = (1, 28, 28), (3, 32, 32), (54, 1, 1)
# name -> shape of its images, classes, parameters of body and head
MODELS = {
    "dnn100": (GREY, 10, 78_500, 1_010),
    "linear": (GREY, 10, 0, 7_840),
    "logreg": (GREY, 10, 0, 7_850),
    "mlp256": (GREY, 10, 200_960, 2_570),
    "mlp2": (GREY, 62, 197_200, 12_462),  # 784*200+200 + 200*200+200; 200*62+62: 209,662
    "mlp_fedrep": (GREY, 62, 549_696, 4_030),  # 784*512+512 + 512*256+256 + 256*64+64; 64*62+62: 553,726
    "mlp3072": (COLOUR, 10, 307_300, 1_010),  # 3072*100+100; 100*10+10: 308,310
    "cnn5": (COLOUR, 10, 307_192, 650),
    # 3*64*25+64 + 64*128*25+128 + 3200*256+256 + 256*128+128; 128*100+100: 1,075,044
    "cnn5_100": (COLOUR, 100, 1_062_144, 12_900),
    "lenet": (COLOUR, 10, 61_156, 850),  # 3*6*25+6 + 6*16*25+16 + 400*120+120 + 120*84+84; 84*10+10: 62,006
    "lenet_nopool2": (COLOUR, 10, 205_156, 850),  # as lenet, with 1600*120+120 instead of 400*120+120: 206,006
    # 32*25+32 + 32*64*25+64 + 1024*2048+2048; 2048*62+62: 2,278,334
    "convnet_emnist": (GREY, 62, 2_151_296, 127_038),
    "vgg_s": (COLOUR, 10, 278_784, 1_290),
    "vgg_s_single": (COLOUR, 10, 245_760, 1_290),  # features; 128*10+10
    "vgg_s_512": (COLOUR, 10, 574_464, 5_130),  # features + 128*512+512 + 512*512+512; 512*10+10: 333,834 behind them
    # stem 1728+128; two blocks at each width w of 4*9*w*w+8*w, where the first convolution of the later stages has half
    # of the inputs, and a projection w*w/2+2*w: 147,968 + 525,568 + 2,099,712 + 8,393,728
    "resnet18_cifar": (COLOUR, 100, 11_168_832, 51_300),
    # stem 864+64; a block from a to b channels has 9*a+2*a + a*b+2*b
    "mobilenet_cifar": (COLOUR, 100, 3_206_976, 102_500),
    "bnn100": (GREY, 9, 78_501, 909),  # 784*100+100 and log gamma; 100*9+9: 79,409 + 1
    "blr": (TABLE, 2, 1, 54),  # log xi; the weights
}
NORMALISED = {"vgg_s", "vgg_s_single", "vgg_s_512", "resnet18_cifar", "mobilenet_cifar"}
NORMS = ("bn_nostats", "bn_stats", "gn")
# channels that are normalised: 16+32+64+128+128; the stem and every convolution of the others
CHANNELS = {"vgg_s": 368, "vgg_s_single": 368, "vgg_s_512": 368, "resnet18_cifar": 4_800, "mobilenet_cifar": 10_944}
CASES = [(name, norm) for name in MODELS for norm in (NORMS if name in NORMALISED else NORMS[:1])]


def network(name, norm="bn_nostats", trained="all", seed=0):
    shape, classes, *_ = MODELS[name]
    net = Network(build_model(name, shape, classes, norm), CPU, trained=trained)
    net.initialise(torch.Generator().manual_seed(seed))
    net.use_generator(torch.Generator().manual_seed(3))
    return net


def plain_twin(name, norm, net):
    """The ordinary torch module with the same content, in training mode, with the same dropout to come.

    Channels-last too: between layouts the last bits differ, which flips a few ReLUs of a deep network, and those move
    its gradient by percents (with a smooth function in their place the layouts agree to 1e-5).
    """
    shape, classes, *_ = MODELS[name]
    module = build_model(name, shape, classes, norm)
    module.load_state_dict({key: value.contiguous() for key, value in net.module.state_dict().items()})
    for layer in module.modules():
        if hasattr(layer, "generator"):
            layer.generator = torch.Generator().manual_seed(3)
    return module.to(memory_format=torch.channels_last)


def batch(name, size=4):
    shape, classes, *_ = MODELS[name]
    x = torch.randn(size, *shape, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last), torch.arange(size) % classes


# --- what they are ---


def test_every_model_that_ships_is_tested_here():
    assert set(model_names()) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_those_of_the_specification(name):
    net, (_, _, body, head) = network(name), MODELS[name]

    assert (net.d, net.n_parameters) == (body + head, body + head)
    assert (net.body, net.head) == (slice(0, body), slice(body, body + head))


def test_the_gate_of_a_mixture_is_the_same_network_with_two_outputs():
    net = Network(build_model("mobilenet_cifar", COLOUR, 2), CPU)

    assert (net.body, net.head) == (slice(0, 3_206_976), slice(3_206_976, 3_209_026))  # 1024*2+2 = 2,050


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_the_last_linear_layer(name):
    head = network(name).module[-1]

    assert isinstance(head, nn.Linear)
    assert sum(p.numel() for p in head.parameters()) == MODELS[name][3]


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_there_is_one_output_per_class(name, norm):
    net, (x, _) = network(name, norm), batch(name)

    assert net.logits(x).shape == net.logits(x, training=True).shape == (4, MODELS[name][1])


@pytest.mark.parametrize("name", sorted(NORMALISED))
def test_the_normalisation_is_the_chosen_one(name):
    kinds = {norm: {type(m) for m in network(name, norm).module.modules() if _is_norm(m)} for norm in NORMS}

    assert kinds == {"bn_nostats": {nn.BatchNorm2d}, "bn_stats": {nn.BatchNorm2d}, "gn": {nn.GroupNorm}}
    assert {m.num_groups for m in network(name, "gn").module.modules() if _is_norm(m)} == {2}
    assert {m.momentum for m in network(name, "bn_stats").module.modules() if _is_norm(m)} == {0.1}


def _is_norm(layer):
    return isinstance(layer, (nn.BatchNorm2d, nn.GroupNorm))


@pytest.mark.parametrize("name", sorted(set(MODELS) - NORMALISED))
def test_models_without_normalisation_ignore_the_choice(name):
    assert not any(_is_norm(m) for m in network(name, "gn").module.modules())


@pytest.mark.parametrize("name", sorted(NORMALISED))
def test_running_statistics_are_two_more_coordinates_per_channel_of_the_body(name):
    _, _, body, head = MODELS[name]
    net = network(name, "bn_stats")

    assert net.d == body + head + 2 * CHANNELS[name]
    assert net.n_parameters == body + head
    assert net.head == slice(net.d - head, net.d)
    assert network(name, "bn_stats", trained="body").n_parameters == body


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_the_norm_mask_covers_scale_shift_and_running_statistics(name, norm):
    net = network(name, norm)

    per_channel = 4 if norm == "bn_stats" else 2
    assert int(net.norm_mask.sum()) == per_channel * CHANNELS.get(name, 0)
    assert not net.norm_mask[net.head].any()


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_only_batch_norm_without_running_statistics_uses_batch_statistics(name, norm):
    net, (x, _) = network(name, norm), batch(name)
    assert net.uses_batch_statistics == (name in NORMALISED and norm == "bn_nostats")

    with torch.no_grad():
        alone, among_others = net.logits(x[:2]), net.logits(x)[:2]

    assert torch.allclose(alone, among_others, rtol=1e-3, atol=1e-4) != net.uses_batch_statistics


@pytest.mark.parametrize(
    ("names", "side", "other"),
    [
        (["cnn5", "cnn5_100", "lenet", "lenet_nopool2", *sorted(NORMALISED)], 32, 28),
        (["convnet_emnist"], 28, 32),
    ],
)
def test_a_convolutional_network_refuses_images_of_another_size(names, side, other):
    for name in names:
        with pytest.raises(FedbenchError, match=f"{name} is for {side}x{side} images, not {other}x{other}"):
            build_model(name, (1, other, other), 10)
        assert build_model(name, (1, side, side), 10).eval()(torch.zeros(2, 1, side, side)).shape == (2, 10)


@pytest.mark.parametrize("name", ["dnn100", "logreg", "mlp256", "mlp2", "mlp_fedrep", "mlp3072", "bnn100"])
def test_fully_connected_networks_take_images_of_any_size(name):
    assert build_model(name, (2, 3, 5), 7)(torch.zeros(4, 2, 3, 5)).shape == (4, 7)


def test_logistic_regression_by_particles_refuses_more_than_two_classes():
    with pytest.raises(FedbenchError, match="blr is for 2 classes, not 10"):
        build_model("blr", TABLE, 10)


def test_making_a_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()

    build_model("lenet", COLOUR, 10)

    assert torch.equal(torch.get_rng_state(), before)


# --- what they compute ---


def test_softmax_of_blr_is_the_sigmoid_of_the_weighted_sum():
    net, (x, _) = network("blr"), batch("blr")

    _, weights = net.flat.split([1, 54])

    torch.testing.assert_close(net.logits(x).softmax(-1)[:, 1], (x.flatten(1) @ weights).sigmoid())


@pytest.mark.parametrize("name", ["blr", "bnn100"])
def test_the_log_precision_is_the_first_coordinate_and_changes_no_output(name):
    net, (x, y) = network(name), batch(name)
    before = net.logits(x)
    assert net.flat[0] == 0

    net.flat[0] = 5.0
    backward(net, x, y)

    assert net.module.log_precision.tolist() == [5.0]
    assert torch.equal(net.logits(x), before)
    assert net.grad[0] == 0
    assert net.grad[1:].any()


def test_bnn100_has_linear_outputs():
    net, (x, _) = network("bnn100"), batch("bnn100")
    hidden, head = net.module[1], net.module[3]

    expected = relu(x.flatten(1) @ hidden.weight.T + hidden.bias) @ head.weight.T + head.bias

    torch.testing.assert_close(net.logits(x), expected)


@pytest.mark.parametrize(("before", "after", "stride"), [(4, 4, 1), (4, 8, 2)])
def test_a_basic_block_adds_its_input_or_a_projection_of_it(before, after, stride):
    block = BasicBlock(before, after, stride, "bn_nostats")
    x = torch.randn(2, before, 6, 6, generator=torch.Generator().manual_seed(0))
    first, _, _, second, _ = block.residual

    def normalised(values):
        return batch_norm(values, None, None, training=True)

    inner = normalised(conv2d(relu(normalised(conv2d(x, first.weight, None, stride, 1))), second.weight, None, 1, 1))
    direct = x if stride == 1 else normalised(conv2d(x, block.shortcut[0].weight, None, stride))

    torch.testing.assert_close(block(x), relu(inner + direct))


def test_images_shrink_to_one_pixel_on_the_way_through_mobilenet():
    net = network("mobilenet_cifar")
    sides, x = [], batch("mobilenet_cifar")[0]

    for layer in net.module[:-2]:
        x = layer(x)
        sides.append(x.shape[-1])

    # stem (convolution, norm, relu), 13 blocks of which the 2nd, 4th, 6th and 12th halve, pooling
    assert sides == [32, 32, 32, 32, 16, 16, 8, 8, 4, 4, 4, 4, 4, 4, 2, 2, 1]
    assert x.shape == (4, 1024, 1, 1)


# --- the flat buffer ---


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_a_change_of_the_flat_buffer_is_a_change_of_the_module(name, norm):
    net = network(name, norm)

    net.flat.copy_(torch.arange(net.d))

    statistics = [value for key, value in net.module.named_buffers() if "running" in key]
    contents = [*(p.detach() for p in net.module.parameters()), *statistics]
    assert torch.equal(torch.cat([value.flatten() for value in contents]).sort().values, net.flat)
    assert {value.untyped_storage().data_ptr() for value in contents} == {net.flat.untyped_storage().data_ptr()}
    assert net.module[-1].weight.flatten()[0] == net.head.start


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_logits_and_gradients_are_those_of_the_plain_module(name, norm):
    net, (x, y) = network(name, norm), batch(name)
    plain = plain_twin(name, norm, net)

    logits = net.logits(x, training=True)
    cross_entropy(logits, y).backward()
    expected = plain(x)
    cross_entropy(expected, y).backward()

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert net.grad.any()
    for ours, theirs in zip(net.module.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:  # the log precision
            assert not ours.grad.any()
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    for ours, theirs in zip(net.module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_outputs_in_evaluation_are_those_of_the_plain_module(name, norm):
    net, (x, _) = network(name, norm), batch(name)

    torch.testing.assert_close(net.logits(x), plain_twin(name, norm, net).eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_a_step_along_the_flat_gradient_is_a_step_of_every_parameter(name, norm):
    # would fail if values and gradients lay in different orders in their buffers
    net, (x, y) = network(name, norm), batch(name)
    backward(net, x, y)
    expected = [p.detach() - 0.1 * p.grad for p in net.module.parameters()]

    net.load(net.vector - 0.1 * net.grad)

    for ours, theirs in zip(net.module.parameters(), expected, strict=True):
        assert torch.equal(ours.detach(), theirs)


@pytest.mark.parametrize("name", sorted(NORMALISED))
def test_running_statistics_have_no_gradient(name):
    net = network(name, "bn_stats")

    backward(net, *batch(name))

    scales_and_shifts = sum(p.numel() for m in net.module.modules() if _is_norm(m) for p in m.parameters())
    assert int((net.grad[net.norm_mask] == 0).sum()) >= net.d - net.n_parameters
    assert int((net.grad[net.norm_mask] != 0).sum()) <= scales_and_shifts


@pytest.mark.parametrize(
    "name", [name for name, (shape, *_) in MODELS.items() if shape == COLOUR and name != "mlp3072"]
)
def test_convolution_weights_lie_channels_last(name):
    net = network(name)

    for layer in net.module.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.is_contiguous(memory_format=torch.channels_last)
            assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)


# --- initial values ---


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_initialisation_depends_on_its_generator_and_on_nothing_else(name, norm):
    one = network(name, norm, seed=5)
    other = network(name, norm, seed=6)
    assert not torch.equal(other.vector, one.vector)

    other.flat.fill_(7.0)
    other.initialise(torch.Generator().manual_seed(5))

    assert torch.equal(other.vector, one.vector)


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_weights_start_uniform_norms_as_the_identity(name, norm):
    for layer in network(name, norm).module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            bound = layer.weight[0].numel() ** -0.5
            assert 0.8 * bound < layer.weight.abs().max() <= bound
            assert layer.bias is None or 0 < layer.bias.abs().max() <= bound
        elif _is_norm(layer):
            assert layer.weight.unique().tolist() == [1]
            assert layer.bias.unique().tolist() == [0]
            for name_of_buffer, value in layer.named_buffers():
                assert value.unique().tolist() == [1 if name_of_buffer == "running_var" else 0]


def test_the_normalisation_does_not_change_what_the_other_layers_start_with():
    nets = [network("vgg_s", norm) for norm in NORMS]

    starts = [net.vector[~net.norm_mask] for net in nets]

    assert all(torch.equal(start, starts[0]) for start in starts)
