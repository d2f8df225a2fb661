"""Scores: against the formula, against what must be worse, and what is refused."""

import pytest
import torch
from torch import Tensor

from tread_zoo.data import digits
from tread_zoo.evaluation import load_digits_features, score
from tread_zoo.evaluation.features import INCEPTION_FILE

TRAIN, HELD_OUT = digits().train, digits().held_out


def _fid(generated: Tensor) -> float:
    return score(generated, TRAIN.images, metrics=("fid",))["values"]["fid"]


def _frechet(x: Tensor, y: Tensor) -> float:
    """|m1 - m2|^2 + tr(S1) + tr(S2) - 2 tr((S1^(1/2) S2 S1^(1/2))^(1/2)), by eigenvalues."""
    mean = (x.mean(0) - y.mean(0)).square().sum()
    cov_x, cov_y = torch.cov(x.T), torch.cov(y.T)
    values, vectors = torch.linalg.eigh(cov_x)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_y @ root).clamp(min=0).sqrt().sum()
    return (mean + cov_x.trace() + cov_y.trace() - 2 * cross).item()


@pytest.fixture(scope="module")
def real() -> float:
    """The distance of the real digits held out: what a perfect model would get."""
    return _fid(HELD_OUT.images)


def test_fid_is_the_frechet_distance_of_the_features(real):
    network = load_digits_features().double()
    x, y = (network(images)[0] for images in (HELD_OUT.images, TRAIN.images))
    assert real == pytest.approx(_frechet(x, y), rel=1e-3)


def test_a_set_has_no_distance_from_itself():
    values = score(HELD_OUT.images, HELD_OUT.images)["values"]
    assert values["fid"] == pytest.approx(0, abs=1e-4)
    assert values["kid"] <= 0  # unbiased, so below 0 here
    assert values["precision"] == values["recall"] == 1.0


def test_worse_sets_have_a_larger_distance(real):
    images = HELD_OUT.images
    noise = 40 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    noised = (images + noise).clamp(0, 255).to(torch.uint8)
    assert _fid(images.roll(1, dims=3)) > 5 * real
    assert _fid(noised) > 3 * real
    assert _fid(images[HELD_OUT.labels != 3]) > 3 * real


def test_precision_is_of_the_generated_and_recall_of_the_reference():
    few = HELD_OUT.images[HELD_OUT.labels < 3]
    values = score(few, HELD_OUT.images, metrics=("precision", "recall"))["values"]
    assert values["precision"] > 0.95
    assert values["recall"] < 0.6
    assert set(values) == {"precision", "recall"}


def test_the_record_says_what_it_depends_on():
    record = score(
        HELD_OUT.images[:30], TRAIN.images[:50], seed=7, metrics=("fid", "kid", "isc"),
        allow_few_images=True,
    )  # fmt: skip
    assert record["extractor"].startswith("digits-cnn-64@")
    assert len(record["extractor"]) == len("digits-cnn-64@") + 8
    assert (record["num_generated"], record["num_reference"]) == (30, 50)
    assert (record["image_size"], record["channels"], record["seed"]) == ([8, 8], 1, 7)
    assert record["kid_subset_size"] == 30
    assert record["torch_fidelity"]
    assert set(record["values"]) == {"fid", "kid", "kid_std", "isc", "isc_std"}
    assert all(type(value) is float for value in record["values"].values())


def test_scoring_is_repeatable_quiet_and_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    state = torch.get_rng_state()
    few = {"allow_few_images": True}
    first, second = (score(HELD_OUT.images[:30], TRAIN.images[:50], **few) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


_GREY = torch.zeros(20, 1, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("generated", "options", "message"),
    [
        (_GREY, {"metrics": ("fdi",)}, r"metrics='fdi' is unknown. Did you mean 'fid'"),
        (_GREY, {"metrics": ()}, r"metrics=\(\) names none; use some of fid"),
        (_GREY, {"extractor": "digits-cnn"}, r"extractor='digits-cnn' is unknown.*digits-cnn-64"),
        (_GREY, {"device": "cud"}, r"device='cud' is unknown. Did you mean 'cuda'"),
        (_GREY.float(), {}, r"generated has dtype torch.float32.*to_uint8"),
        (_GREY[:, 0], {}, r"generated has .*shape \(20, 8, 8\)"),
        (_GREY[:1], {"metrics": ("fid",)}, r"generated has 1 image\(s\); fid takes at least 2"),
        (_GREY[:0], {}, r"generated has 0 image\(s\)"),
        (_GREY[:3], {}, r"generated has 3 .*; precision takes at least 4.*leave 'precision' out"),
        (
            _GREY,
            {},
            r"generated has 20 image\(s\), and 'fid' .* 64 features.*Give 65 images or more",
        ),
        (_GREY[:9], {"metrics": ("isc",)}, r"9 image\(s\); isc takes at least 10"),
        (_GREY[..., 1:], {}, r"of \(1, 8, 7\), reference of \(1, 8, 8\); bring both to one size"),
        (_GREY, {"inception_weights": "x.pth"}, r"inception_weights='x.pth' is of no use"),
    ],
)
def test_score_refuses(generated, options, message):
    with pytest.raises(ValueError, match=message):
        score(generated, _GREY, **options)


def test_the_reference_is_checked_too():
    with pytest.raises(ValueError, match=r"reference has 1 image\(s\); fid takes at least 2"):
        score(_GREY, _GREY[:1])


def test_the_digits_extractor_refuses_what_is_no_grey_digit():
    images = torch.zeros(20, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"grey 8x8 digits only.*\(3, 8, 8\).*inception"):
        score(images, images)


def test_inception_says_where_it_looked_and_never_downloads(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    with pytest.raises(ValueError, match=rf"hub/checkpoints/{INCEPTION_FILE}' does.*https://"):
        score(_GREY, _GREY, extractor="inception-v3-compat")
    with pytest.raises(ValueError, match=r"there.pth' does not exist.*set inception_weights"):
        score(_GREY, _GREY, extractor="inception-v3-compat", inception_weights="there.pth")
    with pytest.raises(ValueError, match=rf"{tmp_path}/{INCEPTION_FILE}' does not exist"):
        score(_GREY, _GREY, extractor="inception-v3-compat", inception_weights=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_inception_weights_that_are_none(tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"not found, said the server")
    with pytest.raises(ValueError, match=r"weights.pth' cannot be read .*Download"):
        score(_GREY, _GREY, extractor="inception-v3-compat", inception_weights=str(file))
    torch.save({"weight": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"weights.pth' holds no weights of torch-fidelity's"):
        score(_GREY, _GREY, extractor="inception-v3-compat", inception_weights=str(file))


def test_the_held_out_loss_is_that_of_fixed_draws_by_level():
    """Against a network whose loss is known at each level: it predicts nothing."""
    from tests.small_run import parts_of, settings
    from tread_zoo.data import to_model_range
    from tread_zoo.evaluation.held_out import held_out_loss
    from tread_zoo.seeding import make_generator

    parts = parts_of(settings())
    network = parts.backbone.eval()  # its output is exactly 0 at the start
    given = {"seed": 3, "precision": "fp32"}
    one = held_out_loss(network, parts.objective, parts.data, **given)
    x = to_model_range(parts.data.held_out.images)
    draw = parts.objective.draw(x.shape, make_generator("held_out", 3))
    losses = (draw.noise - x).square().mean((1, 2, 3))[draw.level.argsort()]
    assert one[0] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert one[1] == pytest.approx([float(p.mean()) for p in losses.tensor_split(4)], rel=1e-5)
    several = held_out_loss(network, parts.objective, parts.data, num_draws=4, **given)
    assert several != one
    assert several == held_out_loss(network, parts.objective, parts.data, num_draws=4, **given)


def test_few_of_a_sorted_set_are_of_all_its_classes():
    from tread_zoo.data import ArrayDataset
    from tread_zoo.evaluation.held_out import stack_part

    labels = torch.arange(10).repeat_interleave(30)
    images = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    some, found = stack_part(ArrayDataset(images, labels), 20)
    assert found.bincount().tolist() == [2] * 10
    assert torch.equal(some[:, 0, 0, 0].long(), found)
