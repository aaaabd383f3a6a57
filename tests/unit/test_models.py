"""The papers' networks, and the flat buffer that their parameters are views of."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedbench.errors import FedbenchError
from fedbench.models import build_model
from fedbench.models.network import Network
from fedbench.training import backward, local_sgd

CPU = torch.device("cpu")
GREY, COLOUR = (1, 28, 28), (3, 32, 32)
SHAPES = {"dnn100": GREY, "logreg": GREY, "mlp256": GREY, "vgg_s": COLOUR, "cnn5": COLOUR}


def network(name, trained="all", seed=0):
    net = Network(build_model(name, SHAPES[name], 10), CPU, trained=trained)
    net.initialise(torch.Generator().manual_seed(seed))
    return net


def batch(name, size=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, *SHAPES[name], generator=generator), torch.arange(size) % 10


def plain_twin(name, net):
    """The ordinary torch module with the same weights."""
    module = build_model(name, SHAPES[name], 10)
    module.load_state_dict(net.module.state_dict())
    return module


@pytest.mark.parametrize(
    ("name", "total", "body", "head"),
    [
        ("dnn100", 79_510, 78_500, 1_010),  # 784*100+100, 100*10+10
        ("logreg", 7_850, 0, 7_850),  # 784*10+10
        ("mlp256", 203_530, 200_960, 2_570),  # 784*256+256, 256*10+10
        # convolutions 448+4640+18496+73856+147584 and norms 2*(16+32+64+128+128): 245,760 features;
        # classifier 2*(128*128+128)+1290 = 34,314, of which the last layer is the head
        ("vgg_s", 280_074, 278_784, 1_290),
        ("cnn5", 307_842, 307_192, 650),  # 4864+102464+192120+7744, 64*10+10
    ],
)
def test_parameter_counts_are_those_of_the_specification(name, total, body, head):
    net = network(name)

    assert (net.d, net.body, net.head) == (total, slice(0, body), slice(body, body + head))


def test_vgg_s_has_245760_parameters_in_its_features_with_the_norms():
    module = build_model("vgg_s", COLOUR, 10)

    flatten = next(i for i, layer in enumerate(module) if isinstance(layer, torch.nn.Flatten))

    assert sum(p.numel() for p in module[:flatten].parameters()) == 245_760
    assert sum(p.numel() for p in module[flatten:].parameters()) == 34_314


@pytest.mark.parametrize("name", SHAPES)
def test_a_change_of_the_flat_buffer_is_a_change_of_the_module(name):
    net = network(name)

    net.flat.copy_(torch.arange(net.d) % 1000)

    values = torch.cat([p.detach().flatten() for p in net.module.parameters()])
    assert torch.equal(values.sort().values, net.flat.sort().values)
    assert all(p.untyped_storage().data_ptr() == net.flat.untyped_storage().data_ptr() for p in net.module.parameters())


def test_the_flat_buffer_holds_the_layers_in_order():
    net = network("dnn100")

    # weights of layer 1 (78,400), its biases (100), weights of layer 2 (1,000), its biases (10)
    net.flat.zero_()
    net.flat[[0, 78_400, 78_500, 79_500]] = torch.tensor([1.0, 2.0, 3.0, 4.0])

    hidden, last = net.module[1], net.module[3]
    first_of_each = [t.flatten()[0].item() for t in (hidden.weight, hidden.bias, last.weight, last.bias)]
    assert first_of_each == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("dnn100", (0, 78_500)),  # 784*100+100
        ("logreg", (0,)),
        ("vgg_s", (245_760, 262_272, 278_784)),  # the features, and twice 128*128+128
        ("cnn5", (107_328, 299_448, 307_192)),  # 4864+102464, 192120, 7744
    ],
)
def test_linear_layers_begin_where_the_network_says(name, starts):
    net = network(name)

    linear = [layer for layer in net.module.modules() if isinstance(layer, torch.nn.Linear)]

    assert net.linear_starts == starts
    assert [layer.weight.storage_offset() for layer in linear] == list(starts)
    assert net.linear_starts[-1] == net.head.start


def test_a_part_is_a_view_of_the_vector_and_of_its_gradient():
    net = network("dnn100")
    backward(net, *batch("dnn100"))
    before, grad = net.vector.clone(), net.grad.clone()

    part = net.parameter(slice(100, 300))
    torch.optim.SGD([part], lr=0.5, weight_decay=0.1).step()

    # w - 0.5 (grad + 0.1 w) there, and nothing anywhere else
    expected = before.clone()
    expected[100:300] = 0.95 * before[100:300] - 0.5 * grad[100:300]
    torch.testing.assert_close(net.vector.data, expected)
    assert torch.equal(net.vector[300:], before[300:])
    assert torch.equal(net.vector[:100], before[:100])


@pytest.mark.parametrize("name", SHAPES)
def test_backward_leaves_the_gradient_in_the_flat_buffer(name):
    net = network(name)
    assert not net.grad.any()

    backward(net, *batch(name))

    gradients = torch.cat([p.grad.flatten() for p in net.module.parameters()])
    assert net.grad.any()
    assert torch.equal(gradients.sort().values, net.grad.sort().values)


@pytest.mark.parametrize("name", SHAPES)
def test_backward_starts_from_a_zero_gradient(name):
    net, (x, y) = network(name), batch(name)

    backward(net, x, y)
    once = net.grad.clone()
    backward(net, x, y)

    assert torch.equal(net.grad, once)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_plain_module(name):
    net, (x, _) = network(name), batch(name)

    torch.testing.assert_close(net.logits(x), plain_twin(name, net)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "width"), [("dnn100", 100), ("mlp256", 256), ("vgg_s", 128), ("cnn5", 64)])
def test_the_head_makes_logits_of_the_features(name, width):
    net, (x, _) = network(name), batch(name)

    features = net.features(x)

    assert features.shape == (8, width)
    torch.testing.assert_close(net.module[-1](features), net.logits(x))


def test_features_drop_out_in_training_only():
    net = Network(build_model("cnn5_100", COLOUR, 100), CPU)
    net.initialise(torch.Generator().manual_seed(0))
    net.use_generator(torch.Generator().manual_seed(0))
    x, _ = batch("cnn5")

    # a unit is zeroed with probability 0.6, the others grow by 1 / 0.4
    whole, thinned = net.features(x), net.features(x, training=True)
    kept = thinned != 0
    torch.testing.assert_close(thinned[kept], whole[kept] / 0.4)
    assert (~kept & (whole != 0)).any()


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_the_plain_module(name):
    net, (x, y) = network(name), batch(name)
    plain = plain_twin(name, net)

    backward(net, x, y)
    cross_entropy(plain(x), y).backward()

    for ours, theirs in zip(net.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["cnn5", "vgg_s"])
def test_convolution_weights_lie_channels_last(name):
    net = network(name)

    convolutions = [layer for layer in net.module if isinstance(layer, torch.nn.Conv2d)]

    for layer in convolutions:
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
        assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["cnn5", "vgg_s"])
def test_a_step_along_the_flat_gradient_is_a_step_of_every_parameter(name):
    # would fail if values and gradients lay in different orders in their buffers
    net, (x, y) = network(name), batch(name)
    plain = plain_twin(name, net)
    cross_entropy(plain(x), y).backward()
    expected = [p.detach() - 0.1 * p.grad for p in plain.parameters()]

    backward(net, x, y)
    net.load(net.vector - 0.1 * net.grad)

    for ours, theirs in zip(net.module.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-3, atol=1e-5)


def test_the_norm_mask_is_true_at_the_affine_parameters_of_norms_only():
    net = network("vgg_s")

    # 2 * (16 + 32 + 64 + 128 + 128); the first norm follows the 448 parameters of the first convolution
    assert int(net.norm_mask.sum()) == 736
    assert net.norm_mask[:481].nonzero().flatten().tolist() == list(range(448, 480))
    assert not network("cnn5").norm_mask.any()


def test_only_networks_with_batch_norm_use_batch_statistics():
    assert {name for name in SHAPES if network(name).uses_batch_statistics} == {"vgg_s"}


def test_training_the_body_means_that_the_vector_is_the_body():
    net = network("dnn100", trained="body")

    assert net.d == 78_500
    assert net.grad.shape == net.vector.shape == net.norm_mask.shape == (78_500,)


def test_loading_a_body_leaves_the_head_alone():
    net = network("dnn100", trained="body")
    head = net.flat[net.head].clone()

    net.load(torch.full((78_500,), 7.0))

    assert torch.equal(net.flat[net.body], torch.full((78_500,), 7.0))
    assert torch.equal(net.flat[net.head], head)


def test_training_the_body_never_moves_the_head(make_ctx):
    ctx = make_ctx(client=0, train_part="body", tau=3, lr=0.1)
    net = ctx.task.net
    head = net.flat[net.head].clone()

    trained, _ = local_sgd(ctx.task.initial, ctx.task.train_data(0), ctx)

    # digits: 64*100+100 body parameters
    assert trained.shape == ctx.task.initial.shape == (6_500,)
    assert not torch.equal(trained, ctx.task.initial)
    assert torch.equal(net.flat[net.head], head)


@pytest.mark.parametrize("name", SHAPES)
def test_weights_and_biases_start_uniform_within_one_over_the_root_of_fan_in(name):
    net = network(name)

    for layer in net.module:
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
            bound = layer.weight[0].numel() ** -0.5
            assert layer.weight.abs().max() <= bound
            assert layer.weight.abs().max() > 0.9 * bound
            # a uniform variable on (-b, b) has standard deviation b / sqrt 3
            assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
            assert 0 < layer.bias.abs().max() <= bound


def test_norms_start_as_the_identity():
    net = network("vgg_s")

    for layer in net.module:
        if isinstance(layer, torch.nn.BatchNorm2d):
            assert torch.equal(layer.weight, torch.ones_like(layer.weight))
            assert torch.equal(layer.bias, torch.zeros_like(layer.bias))


@pytest.mark.parametrize("name", ["dnn100", "vgg_s"])
def test_initialisation_depends_on_its_generator_and_on_nothing_else(name):
    torch.manual_seed(1)
    one = network(name, seed=5).vector
    torch.manual_seed(2)

    assert torch.equal(network(name, seed=5).vector, one)
    assert not torch.equal(network(name, seed=6).vector, one)


def test_the_initial_vector_is_the_same_whichever_part_is_trained(make_ctx):
    whole, body = make_ctx(train_part="all").task, make_ctx(train_part="body").task

    assert torch.equal(whole.initial[whole.net.body], body.initial)
    assert torch.equal(whole.net.flat, body.net.flat)


@pytest.mark.parametrize("name", ["cnn5", "vgg_s"])
def test_a_convolutional_network_refuses_images_of_another_size(name):
    with pytest.raises(FedbenchError, match=f"{name} is for 32x32 images, not 28x28"):
        build_model(name, GREY, 10)


def test_a_task_refuses_a_model_that_does_not_fit_its_images(make_ctx):
    with pytest.raises(FedbenchError, match="not 8x8"):
        make_ctx(model="cnn5")


def test_an_unknown_model_is_named_with_the_nearest_known_one():
    with pytest.raises(FedbenchError, match="Did you mean dnn100"):
        build_model("dnn10", GREY, 10)


def test_fully_connected_networks_take_images_of_any_size():
    # 3*32*32 = 3072 inputs: 3072*100+100 + 1010
    assert Network(build_model("dnn100", COLOUR, 10), CPU).d == 308_310


# --- where weights lie ---


def test_weights_and_biases_have_their_slices():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))

    assert Network(layers, CPU).tensors == (slice(0, 6), slice(6, 9), slice(9, 12), slice(12, 13))
    assert Network(layers, CPU, trained="body").tensors == (slice(0, 6), slice(6, 9))


def test_a_column_is_what_one_input_of_a_layer_is_multiplied_by():
    net = Network(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), CPU)

    # rows of the first weight (3 outputs of 2 inputs), its biases, the second weight, its bias
    assert net.input_columns.tolist() == [1, 2, 1, 2, 1, 2, 0, 0, 0, 3, 4, 5, 0]


def test_a_frozen_head_has_no_columns_in_the_trained_vector():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))

    assert Network(layers, CPU, trained="body").input_columns.tolist() == [1, 2, 1, 2, 1, 2, 0, 0, 0]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_without_the_column_of_a_channel_a_convolution_does_not_see_it(groups):
    module = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, groups=groups), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
    net = Network(torch.nn.Sequential(*module, torch.nn.Linear(8, 2)), CPU)
    net.initialise(torch.Generator().manual_seed(0))
    x, convolution = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(1)), net.module[0]
    other = x.clone()
    other[:, 2] = 7.0

    net.flat[net.input_columns == 3] = 0.0

    assert net.input_columns.max() == 4 + 8
    assert torch.allclose(convolution(x), convolution(other))
    assert convolution.weight.count_nonzero() == 4 * 8 * 9 // groups - 8 // groups * 9
