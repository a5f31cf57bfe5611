import subprocess
import sys

import pytest
import torch

from memfit.errors import SpecError
from memfit.zoo import build
from memfit.zoo.example import classifier_loss

HF_SMALL = "num_hidden_layers=1&hidden_size=32&num_attention_heads=2&vocab_size=100"

STEPS = [
    ("torchvision:resnet18?num_classes=7", (3, 32, 32)),
    ("torchvision:inception_v3?num_classes=7", None),
    ("torchvision:googlenet?num_classes=7", (3, 64, 64)),
    ("torchvision:vit_b_32", (3, 32, 32)),
    ("torchvision:deeplabv3_mobilenet_v3_large?aux_loss=true", (3, 32, 32)),
    ("torchvision:r3d_18", (3, 4, 32, 32)),
    ("timm:resnet18", (1, 64, 64)),
    ("timm:vit_tiny_patch16_224?depth=2", (3, 32, 48)),
    ("timm:vit_small_patch14_dinov2?depth=1", (3, 28, 28)),
    ("timm:resnet18.a1_in1k?drop_rate=0.1&num_classes=7", (3, 32, 32)),
    ("hf:gpt2?n_layer=1&n_embd=32&n_head=2&vocab_size=100", (16,)),
    (f"hf:llama?{HF_SMALL}&num_key_value_heads=1&intermediate_size=64", (16,)),
    (f"hf:bert?{HF_SMALL}&num_labels=5", (16,)),
    (f"hf:bert?{HF_SMALL}&head=masked-lm", (16,)),
    ("hf:t5?num_layers=1&d_model=32&d_ff=64&num_heads=2&d_kv=16&vocab_size=100", (16,)),
    ("hf:vit?num_hidden_layers=1", (1, 32, 32)),
    ("hf:mobilenet_v2?num_labels=7", (3, 64, 64)),
]


@pytest.mark.parametrize(("spec", "shape"), STEPS, ids=[spec.partition("?")[0] for spec, _ in STEPS])
def test_one_small_step_without_a_download(spec, shape, run_step, monkeypatch):
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", lambda *args, **kwargs: pytest.fail("download"))
    example = build(spec, batch=2, shape=shape)
    assert example.model.training
    assert example.args[0].shape == (2, *(shape or (3, 299, 299)))
    run_step(example)


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("torchvision:resnet50", "torchvision resnet50 · 16×3×224×224 float32"),
        ("torchvision:inception_v3", "torchvision inception_v3 · 16×3×299×299 float32"),
        ("timm:inception_v4", "timm inception_v4 · 16×3×299×299 float32"),
        ("hf:gpt2?n_layer=2", "hf gpt2?n_layer=2 · 16×512 float32"),
        ("hf:gpt2?n_layer=2&n_positions=64", "hf gpt2?n_layer=2&n_positions=64 · 16×64 float32"),
        ("zoo:vgg16-trunk", "zoo vgg16-trunk · 16×3×512×512 float32"),
    ],
)
def test_default_shapes_and_labels(spec, label):
    assert build(spec, batch=16, device="meta").label == label


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("hf:gpt2", "GPT2LMHeadModel"),
        ("hf:llama", "LlamaForCausalLM"),
        ("hf:bert", "BertForSequenceClassification"),
        ("hf:roberta", "RobertaForSequenceClassification"),
        ("hf:t5", "T5ForConditionalGeneration"),
        ("hf:gpt2?head=sequence-classification", "GPT2ForSequenceClassification"),
    ],
)
def test_what_a_model_type_is_trained_for(spec, kind):
    example = build(spec, batch=2, device="meta")
    assert type(example.model).__name__ == kind
    assert example.loss_fn is None and list(example.kwargs) == ["labels"]
    assert not getattr(example.model.config, "use_cache", False)


def test_options_reach_the_configuration():
    pytest.importorskip("transformers")
    config = build("hf:gpt2?n_layer=6&n_embd=256&n_head=8&resid_pdrop=0.0", batch=1, device="meta").model.config
    assert (config.n_layer, config.n_embd, config.n_head, config.resid_pdrop) == (6, 256, 8, 0.0)
    assert build("hf:gpt2?num_hidden_layers=3", batch=1, device="meta").model.config.n_layer == 3


def test_the_seed_decides_and_the_random_state_stays():
    def numbers(seed):
        example = build("zoo:mlp?width=8", batch=2, shape=(4,), seed=seed)
        return [*example.model.parameters(), *example.args, example.loss_fn.keywords["target"]]

    before = torch.get_rng_state()
    first, again, other = numbers(0), numbers(0), numbers(1)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_dtype_and_device():
    example = build("zoo:unet?width=4", batch=2, shape=(3, 16, 16), dtype=torch.float64)
    assert {t.dtype for t in [*example.model.parameters(), *example.args]} == {torch.float64}
    assert example.label.endswith("float64")
    meta = build("zoo:seed-gpt2", batch=64, dtype=torch.bfloat16, device="meta")
    assert {p.dtype for p in meta.model.parameters()} == {torch.bfloat16}
    assert meta.args[0].dtype is torch.int64
    assert meta.loss_fn(meta.model(*meta.args)).shape == ()


def test_auxiliary_heads_are_weighted():
    logits, target = torch.randn(3, 4, 7), torch.tensor([0, 1, 2, 3])
    main, first, second = (torch.nn.functional.cross_entropy(part, target) for part in logits)
    from torchvision.models.googlenet import GoogLeNetOutputs
    from torchvision.models.inception import InceptionOutputs

    def loss(output):
        return classifier_loss(output, target=target)

    torch.testing.assert_close(loss(InceptionOutputs(logits[0], logits[1])), main + 0.4 * first)
    torch.testing.assert_close(loss(InceptionOutputs(logits[0], None)), main)
    torch.testing.assert_close(loss(GoogLeNetOutputs(*logits)), main + 0.3 * (first + second))
    torch.testing.assert_close(loss({"out": logits[0], "aux": logits[1]}), main + 0.5 * first)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet50", "file.py:factory or source:name with a source of hf, timm, torchvision, zoo"),
        ("torchvision:", "source:name"),
        ("torchvison:resnet50", "unknown source 'torchvison'; did you mean torchvision"),
        ("torchvision:resnet5", "unknown torchvision model 'resnet5'; did you mean .*resnet50"),
        ("torchvision:raft_large", "is for optical flow; write a file.py:factory"),
        ("torchvision:fasterrcnn_resnet50_fpn", "detection"),
        ("torchvision:resnet18?nope=3", "cannot build torchvision resnet18.nope=3; .*'nope'"),
        ("torchvision:fcn_resnet50?weights_backbone=DEFAULT", "nothing is downloaded"),
        ("timm:vit_smal_patch16_224", "unknown timm model .* did you mean .*vit_small_patch16_224"),
        ("timm:resnet18?pretrained=true", "nothing is downloaded"),
        ("timm:resnet18?nope=3", "cannot build timm resnet18.nope=3"),
        ("hf:gpt3", "unknown transformers model type 'gpt3'; did you mean .*gpt2"),
        ("hf:gpt2?n_layers=3", "unknown option of hf gpt2.n_layers=3 'n_layers'; did you mean n_layer"),
        ("hf:gpt2?n_layer=two", "cannot be configured: .*n_layer"),
        ("hf:gpt2?head=causal", "unknown head 'causal'; did you mean causal-lm"),
        ("hf:gpt2?head=masked-lm", "has no masked-lm head"),
    ],
)
def test_what_cannot_be_built_says_why(spec, message):
    with pytest.raises(SpecError, match=message):
        build(spec, batch=1, device="meta")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch: 0"),
        ({"shape": (3, -1, 4)}, "shape: -1"),
        ({"dtype": torch.int64}, "dtype: torch.int64"),
        ({"device": "tpu9"}, "device: 'tpu9'"),
        ({"shape": (1, 32, 32)}, "takes 3 channels"),
        ({"shape": (32, 32)}, "C×H×W"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(SpecError, match=message):
        build("torchvision:resnet18", **{"batch": 1, **arguments})


def test_too_many_tokens_name_the_option():
    pytest.importorskip("transformers")
    with pytest.raises(SpecError, match=r"up to 1024 tokens; .* n_positions=2000"):
        build("hf:gpt2", batch=1, shape=(2000,), device="meta")


@pytest.mark.parametrize(
    ("spec", "module", "extra"),
    [
        ("torchvision:resnet50", "torchvision", "vision"),
        ("zoo:resnet-deep", "torchvision", "vision"),
        ("timm:resnet18", "timm", "timm"),
        ("hf:gpt2", "transformers", "hf"),
    ],
)
def test_a_missing_package_names_its_extra(spec, module, extra, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SpecError, match=rf"cannot import {module} .*pip install 'memfit\[{extra}\]'"):
        build(spec, batch=1)


def test_importing_the_zoo_imports_torch_and_nothing_larger():
    code = (
        "import sys, memfit.zoo; "
        "print(sorted({'torchvision', 'timm', 'transformers', 'sklearn', 'PIL'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
