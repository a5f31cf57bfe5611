import pytest
import torch

from memfit.errors import SpecError
from memfit.zoo import ZOO_MODELS, build
from memfit.zoo.lstm_classifier import UnrolledLSTM

SMALL = {
    "gpt": ("zoo:gpt?layers=1&width=32&heads=4&vocabulary=50", (16,)),
    "keras-cnn": ("zoo:keras-cnn", (1, 16, 16)),
    "llama": ("zoo:llama?layers=1&width=32&heads=4&vocabulary=50", (16,)),
    "lstm-classifier": ("zoo:lstm-classifier?width=16", (8,)),
    "lstm-unrolled": ("zoo:lstm-classifier?width=16&unrolled=true", (3,)),
    "mlp": ("zoo:mlp?width=16&layers=2", (12,)),
    "resnet-deep": ("zoo:resnet-deep?stage1=1&stage2=1&stage3=1&stage4=1", (3, 32, 32)),
    "seed-gpt2": ("zoo:seed-gpt2?layers=1&width=48", (16,)),
    "unet": ("zoo:unet?width=4&depth=2", (3, 16, 16)),
    "vgg16-trunk": ("zoo:vgg16-trunk", (3, 32, 64)),
}


def parameters(spec: str) -> int:
    return sum(parameter.numel() for parameter in build(spec, batch=1, device="meta").model.parameters())


def test_every_model_is_tried_here():
    assert {spec.partition(":")[2].partition("?")[0] for spec, _ in SMALL.values()} == set(ZOO_MODELS)


@pytest.mark.parametrize("name", SMALL)
def test_one_small_step(name, run_step):
    spec, shape = SMALL[name]
    example = build(spec, batch=2, shape=shape)
    assert example.model.training
    assert example.args[0].shape == (2, *shape)
    run_step(example)


@pytest.mark.parametrize("name", sorted(SMALL.keys() - {"lstm-classifier"}))
def test_dynamo_takes_the_whole_step_in_one_graph(name):
    spec, shape = SMALL[name]
    example = build(spec, batch=2, shape=shape)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(*args):
        return example.loss_fn(example.model(*args))

    step(*example.args).backward()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("zoo:seed-gpt2", 89_762_304),  # seed 002 states it
        ("zoo:gpt?layers=12&width=768&heads=12&positions=1024&vocabulary=50257", 124_439_808),  # GPT-2 small
        ("zoo:vgg16-trunk", 14_710_464 + 512 * 1024),  # VGG16's convolutions without bias, and the linear layer
        ("zoo:resnet-deep", 64_673_832),  # timm's resnet200
        ("zoo:resnet-deep?stage2=4&stage3=6", 25_557_032),  # torchvision's ResNet-50
        ("zoo:mlp?width=20&layers=2", 784 * 20 + 20 + 20 * 20 + 20 + 20 * 10 + 10),
        ("zoo:unet", 31_037_698),  # the usual padded U-Net with BatchNorm, 3 channels to 2 classes
    ],
)
def test_parameter_counts(spec, count):
    assert parameters(spec) == count


def test_the_keras_cnn_holds_what_seed_004_measured():
    example = build("zoo:keras-cnn", batch=16, device="meta")
    saved = []
    own = {parameter.untyped_storage()._cdata for parameter in example.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        example.model(*example.args)
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    assert sum(nbytes for storage, nbytes in held.items() if storage not in own) / 2**20 == pytest.approx(
        2909.8, rel=0.02
    )
    assert sum(p.numel() * 4 for p in example.model.parameters()) / 2**20 == pytest.approx(39.4, rel=0.1)


def test_the_unrolled_lstm_is_torchs_lstm():
    torch.manual_seed(0)
    unrolled = UnrolledLSTM(width=5, layers=2, dropout=0.0)
    lstm = torch.nn.LSTM(5, 5, 2, batch_first=True)
    for layer, cell in enumerate(unrolled.cells):
        for name, parameter in cell.named_parameters():
            parameter.data.copy_(getattr(lstm, f"{name}_l{layer}"))
    x = torch.randn(3, 7, 5)
    torch.testing.assert_close(unrolled(x), lstm(x)[0])


def test_llama_attends_to_relative_positions():
    from memfit.zoo.llama import _rotate, _rotations

    table = _rotations(32, 8)
    q, k = torch.randn(2, 1, 1, 1, 8)
    scores = (_rotate(q.expand(1, 1, 32, 8), table) @ _rotate(k.expand(1, 1, 32, 8), table).mT)[0, 0]
    for offset in (0, 1, 7):
        diagonal = scores.diagonal(-offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_next_token_is_the_target(batch):
    example = build("zoo:gpt?layers=1&width=8&heads=1", batch=batch, shape=(16,))
    (tokens,), target = example.args, example.loss_fn.keywords["target"]
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    assert tokens.is_contiguous() and tokens.untyped_storage().nbytes() == batch * 16 * 8


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("zoo:gpt", (300,), "up to 256 tokens; .* positions=300"),
        ("zoo:gpt", (3, 8, 8), r"samples of shape T, such as \(256,\)"),
        ("zoo:gpt?width=100", None, r"heads divide it \(width=100, heads=6\)"),
        ("zoo:llama?kv_heads=4", None, r"kv_heads divide heads"),
        ("zoo:unet", (3, 40, 32), "multiples of 16"),
        ("zoo:vgg16-trunk", (3, 40, 32), "multiples of 32"),
        ("zoo:resnet-deep", (1, 32, 32), "3 channels"),
        ("zoo:gpt?dropout=2", None, "cannot build zoo gpt.dropout=2"),
        ("zoo:gpt?layer=2", None, "did you mean layers"),
        ("zoo:un", None, "did you mean unet"),
    ],
)
def test_what_cannot_be_built_says_why(spec, shape, message):
    with pytest.raises(SpecError, match=message):
        build(spec, batch=1, shape=shape)
