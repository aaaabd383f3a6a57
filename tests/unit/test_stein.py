"""SVGD, Stein discrepancies and density estimates: worked values, naive formulas, and what they converge to."""

import math

import pytest
import torch

from fedbench.stein import (
    MIN_BANDWIDTH,
    Kde,
    Svgd,
    median_bandwidth,
    stein_kernel,
    svgd_direction,
    u_statistic,
    v_statistic,
)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- the direction of SVGD ---


def test_the_worked_direction():
    particles = column(-1, 1)

    phi = svgd_direction(particles, -particles, 1.0)

    # at -1, for N(0, 1): (1/2) [1 - e^-4 + repulsion -4 e^-4] = (1 - 5 e^-4) / 2
    assert phi.flatten().tolist() == pytest.approx([0.454211, -0.454211], abs=5e-7)


def naive_direction(particles, score, h):
    """The formula, pair by pair, with the kernel's gradient from autograd."""
    phi = torch.zeros_like(particles)
    for x, row in zip(particles, phi, strict=True):
        for theta, s in zip(particles, score, strict=True):
            moving = theta.clone().requires_grad_()
            k = torch.exp(-(moving - x).square().sum() / h)
            (gradient,) = torch.autograd.grad(k, moving)
            row += (k.detach() * s + gradient) / len(particles)
    return phi


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_direction_is_that_of_the_formula_wherever_the_particles_are(offset):
    particles, score = normal(5, 3) + offset, normal(5, 3, seed=1)

    torch.testing.assert_close(
        svgd_direction(particles, score, 1.7), naive_direction(particles, score, 1.7), rtol=1e-8, atol=1e-8
    )


def test_particles_repel_each_other_without_a_score():
    phi = svgd_direction(column(0, 1), column(0, 0), 1.0).flatten()

    # (1/2) (2/h) (theta - other) k, k = e^-1
    assert phi.tolist() == pytest.approx([-math.exp(-1), math.exp(-1)])


def test_one_particle_has_no_company_and_climbs_the_gradient():
    particle, score = normal(1, 4), normal(1, 4, seed=1)

    for bandwidth in ("paper", "code", 0.3):
        assert torch.equal(svgd_direction(particle, score, bandwidth), score)


# --- bandwidths ---


def test_the_bandwidth_is_the_squared_median_distance_over_log_p():
    # distances 1, 3, 4, 6, 7, 3 of (0, 1, 4, 7): sorted 1, 3, 3, 4, 6, 7, median 3.5
    assert median_bandwidth(column(0, 1, 4, 7)) == pytest.approx(3.5**2 / math.log(4))


def test_the_codes_bandwidth_counts_self_distances_and_one_particle_more():
    # squares with zeros: four times 0, twice 1, 9, 9, 16, 36, 49: the middle two of sixteen are both 9
    assert median_bandwidth(column(0, 1, 4, 7), "code") == pytest.approx(9 / math.log(5))


@pytest.mark.parametrize("form", ["paper", "code"])
def test_particles_that_coincide_have_a_bandwidth_and_follow_their_mean_score(form):
    particles, score = torch.full((4, 2), 0.1, dtype=torch.float64), normal(4, 2)

    assert median_bandwidth(particles, form) == MIN_BANDWIDTH
    torch.testing.assert_close(svgd_direction(particles, score, form), score.mean(0).expand(4, 2))


def test_some_that_coincide_do_no_harm():
    particles = normal(5, 2)
    particles[3] = particles[0]

    for form in ("paper", "code"):
        assert svgd_direction(particles, -particles, form).isfinite().all()
        assert v_statistic(particles, -particles, -particles, form).isfinite()


# --- steps ---


def test_the_first_step_has_the_length_of_the_rate_and_the_second_that_of_the_running_mean():
    svgd, start = Svgd(0.5, 1e-12), column(3)

    first = svgd.step(start, column(4))
    second = svgd.step(first, column(2))

    # one particle: phi is the score; G = 16, then 0.9 * 16 + 0.1 * 4 = 14.8
    assert first.item() == pytest.approx(3.5)
    assert second.item() == pytest.approx(3.5 + 0.5 * 2 / math.sqrt(14.8))
    assert start.item() == 3


def test_the_fudge_bounds_the_step_where_nothing_pulls():
    # 0.5 * 1e-3 / (1e-3 + 1e-3)
    assert Svgd(0.5, 1e-3).step(column(0), column(1e-3)).item() == pytest.approx(0.25)


def test_particles_find_a_normal_distribution():
    svgd, particles = Svgd(0.01, 1e-9), normal(50, 1)

    for _ in range(1500):
        particles = svgd.step(particles, -(particles - 2) / 0.25)

    assert particles.mean().item() == pytest.approx(2.0, abs=0.02)
    assert particles.std().item() == pytest.approx(0.49, abs=0.03)


# --- discrepancies ---


def test_the_worked_discrepancy():
    particles = column(-1, 1)

    # pairs: s^2 + 2/h = 3 on the diagonal, e^-4 (-1 + 2 (-4) + 2 - 16) off it; (6 - 46 e^-4) / 4
    assert v_statistic(particles, -particles, -particles, 1.0).item() == pytest.approx(1.289370, abs=5e-7)


def test_the_worked_inner_products():
    particles = column(-1, 0.5)
    of_1, of_2 = -particles, 2 - particles
    mean = (of_1 + of_2) / 2

    def h(left, right):
        return v_statistic(particles, left, right, 1.0).item()

    assert h(of_1, of_1) == pytest.approx(0.680105, abs=5e-7)
    assert h(of_1, of_2) == pytest.approx(0.956454, abs=5e-7)
    assert h(of_2, of_2) == pytest.approx(3.443603, abs=5e-7)
    assert h(of_1, mean) == pytest.approx(0.818280, abs=1e-6)
    assert h(of_2, mean) == pytest.approx(2.200029, abs=1e-6)


def naive_pair(a, b, s, t, h):
    """One entry of the Stein kernel with all derivatives from autograd."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    k = torch.exp(-(a - b).square().sum() / h)
    of_a, of_b = torch.autograd.grad(k, (a, b), create_graph=True)
    trace = sum(torch.autograd.grad(of_a[i], b, retain_graph=True)[0][i] for i in range(len(a)))
    return (k * (s @ t) + s @ of_b + of_a @ t + trace).item()


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_every_pair_is_that_of_the_formula_wherever_the_particles_are(offset):
    particles, left, right = normal(4, 3) + offset, normal(4, 3, seed=1), normal(4, 3, seed=2)

    found = stein_kernel(particles, left, right, 1.3)

    for a in range(4):
        for b in range(4):
            expected = naive_pair(particles[a], particles[b], left[a], right[b], 1.3)
            assert found[a, b].item() == pytest.approx(expected, abs=1e-6), (a, b)


def test_the_mean_of_inner_products_is_the_inner_product_with_the_mean():
    particles, scores = normal(6, 5), [normal(6, 5, seed=seed) for seed in range(1, 5)]
    mean = sum(scores) / 4

    for k in scores:
        of_pairs = [v_statistic(particles, k, m, "paper").item() for m in scores]
        assert sum(of_pairs) / 4 == pytest.approx(v_statistic(particles, k, mean, "paper").item())


def test_matching_samples_have_no_discrepancy():
    particles = normal(2000, 1)

    # over draws the U-statistic has mean -1e-4 and deviation 8e-4
    assert abs(u_statistic(particles, -particles, -particles, 1.0).item()) < 3e-3
    # the diagonal adds E[s^2] + 2/h = 3, over P
    assert v_statistic(particles, -particles, -particles, 1.0).item() == pytest.approx(3 / 2000, abs=3e-3)


def test_samples_of_another_distribution_have_one():
    particles = normal(500, 1) + 1

    assert u_statistic(particles, -particles, -particles, 1.0).item() > 0.1


def test_u_leaves_out_the_pairs_of_a_particle_with_itself():
    particles = column(-1, 1)

    v = v_statistic(particles, -particles, -particles, 1.0).item()

    # V = (2 * 3 + 2 u) / 4
    assert u_statistic(particles, -particles, -particles, 1.0).item() == pytest.approx(2 * v - 3)


def test_a_discrepancy_is_never_negative():
    for seed in range(20):
        assert v_statistic(normal(4, 2, seed=seed), *[normal(4, 2, seed=seed + 50)] * 2, "paper") >= 0


# --- density estimates ---


def test_the_density_is_the_mean_of_gaussians():
    kde = Kde(column(0, 1), 0.55)

    # (1/2) [N(1; 0, 0.55^2) + N(1; 1, 0.55^2)]
    expected = (math.exp(-1 / (2 * 0.3025)) + 1) / 2 / math.sqrt(2 * math.pi * 0.3025)
    assert kde.log_density(column(1)).item() == pytest.approx(math.log(expected))


def test_the_codes_density_has_its_floors_and_p_inside_the_power():
    kde = Kde(column(0, 1), 0.55, "code")

    total = math.exp(-1 / (2 * 0.3025)) + 1 + 2e-9
    density = total / math.sqrt(2 * 2 * math.pi * 0.3025)
    assert kde.log_density(column(1)).item() == pytest.approx(math.log(density + 1e-10))


@pytest.mark.parametrize("form", ["log", "code"])
@pytest.mark.parametrize("shape", [(4, 2), (3, 4, 2)], ids=["one", "a product"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_the_score_is_the_gradient_of_the_log_density(form, shape, offset):
    kde = Kde(normal(*shape) + offset, 0.55, form)
    x = (normal(5, 2, seed=1) + offset).requires_grad_()

    (expected,) = torch.autograd.grad(kde.log_density(x).sum(), x)

    torch.testing.assert_close(kde.score(x.detach()), expected, rtol=1e-9, atol=1e-9)


def test_the_score_of_a_product_is_the_sum_of_scores():
    centres, x = normal(3, 4, 2), normal(5, 2, seed=1)

    alone = [Kde(group, 0.7).score(x) for group in centres]

    torch.testing.assert_close(Kde(centres, 0.7).score(x), sum(alone))


def test_far_from_all_centres_the_exact_form_is_a_spring_to_the_nearest():
    kde, x = Kde(column(0, 1), 0.55), column(1000)

    assert kde.score(x).item() == pytest.approx(-999 / 0.3025, rel=1e-6)
    assert kde.log_density(x).isfinite().all()


def test_far_from_all_centres_the_codes_form_has_no_score():
    assert Kde(column(0, 1), 0.55, "code").score(column(1000)).item() == 0


def test_in_the_dimensions_of_the_papers_tasks_the_code_has_nothing_left_above_its_floor():
    # the largest value of six centres in 54 dimensions: 6 / (6 * 2 pi 0.3025)^27 = 1.7e-28, and 1e-10 is added
    assert 6 / (6 * 2 * math.pi * 0.3025) ** 27 == pytest.approx(1.7e-28, rel=0.02)
    for shape in ((6, 54), (20, 79_410)):
        kde = Kde(torch.zeros(shape, dtype=torch.float64), 0.55, "code")
        assert kde.is_flat
        assert torch.equal(kde.score(kde.centres + 0.1), torch.zeros(shape, dtype=torch.float64))


def test_a_density_below_the_floor_still_has_a_score_until_the_floor_swallows_it():
    kde = Kde(normal(6, 30), 0.55, "code")

    # at most 6 / 11.4^15 = 8e-16 beside 1e-10: a spring, 8e-6 times as strong as without the floor
    assert not kde.is_flat
    weight = (kde.score(kde.centres + 0.1) / Kde(kde.centres, 0.55).score(kde.centres + 0.1)).mean().item()
    kernel = math.exp(-30 * 0.01 / 0.605)
    assert weight == pytest.approx(kernel / (6 * 2 * math.pi * 0.3025) ** 15 / 1e-10, rel=0.01)


def test_in_few_dimensions_the_codes_form_is_not_flat_nor_is_the_exact_one_in_many():
    assert not Kde(normal(6, 3), 0.55, "code").is_flat
    assert not Kde(normal(6, 54), 0.55).is_flat


def test_a_narrow_kernel_in_many_dimensions_is_finite_in_the_codes_form():
    # (6 * 2 pi 0.01)^(-1000) is beyond the largest float
    kde = Kde(normal(6, 2000), 0.1, "code")

    assert not kde.is_flat
    assert kde.score(kde.centres + 0.001).isfinite().all()


# --- manners ---


def test_nothing_changes_its_arguments():
    particles, score = normal(4, 3), normal(4, 3, seed=1)
    before = particles.clone(), score.clone()
    svgd = Svgd(0.1, 1e-9)

    for _ in range(2):
        svgd.step(particles, score)
    stein_kernel(particles, score, score, "paper")
    for form in ("log", "code"):
        Kde(particles, 0.55, form).score(score)

    assert torch.equal(particles, before[0])
    assert torch.equal(score, before[1])
