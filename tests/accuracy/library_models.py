"""Models of public libraries, small and with random weights, each with the step that trains it, as
its documentation has it. A library is imported by the model that needs it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

_WORDS = 200
# Width, layers and heads, as the classes of transformers call them.
_SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
_DEEP = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip

# The smallest of each of these families of timm.
_TIMM = """cpubone_nano cs3darknet_focus_s csatv2 cspnext_tiny deit_tiny_patch16_224 densenet121
    dla46_c dpn48b edgenext_xx_small efficientvim_m1 efficientvit_b0 efficientvit_m0
    ese_vovnet19b_slim_dw fasternet_t0 ghostnet_050 hardcorenas_b hgnetv2_b0 iformer_t
    inception_next_atto lcnetv2_small legacy_seresnet18 levit_128 lowformer_b0 mobilenetv3_small_050
    poolformerv2_s12 pvt_v2_b0 regnetx_002 repghostnet_050 resnest14d resnetv2_18 shvit_s1
    skresnet18 starnet_s050 test_coatnet test_convnext test_mambaout test_nfnet test_resnet test_vit
    test_vit_relpos tinynet_e vit_tiny_r_s16_p8_224"""
_GRAPH_LAYERS = """ARMAConv ChebConv ClusterGCNConv GATConv GATv2Conv GCNConv GraphConv LEConv
    SAGEConv SGConv TAGConv TransformerConv"""


class Trained(NamedTuple):
    """``step(i)`` makes one update, and returns the loss or another number that follows from all of
    them.
    """

    model: nn.Module
    step: Callable[[int], float]


Make = Callable[[], Trained]


def _updates(
    model: nn.Module, loss: Callable[[int], torch.Tensor], *, clips: bool = False, lr: float = 1e-3
) -> Trained:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    model.train()

    def step(i: int) -> float:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.item()

    return Trained(model, step)


def _seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(rows: int = 4, columns: int = 24) -> torch.Tensor:
    return torch.randint(5, _WORDS, (rows, columns), generator=_seeded())


def _image(rows: int = 2, channels: int = 3, side: int = 32) -> torch.Tensor:
    return torch.rand(rows, channels, side, side, generator=_seeded()) * 2 - 1


# ---- transformers --------------------------------------------------------------------------------


def _transformer(kind: str, inputs: Callable[[], dict[str, Any]], **config: Any) -> Make:
    def make() -> Trained:
        transformers = importlib.import_module("transformers")
        cls = getattr(transformers, kind)
        model, given = cls(cls.config_class(**config)), inputs()
        return _updates(model, lambda i: model(**given).loss)

    return make


def _next_words() -> dict[str, Any]:
    return {"input_ids": _words(), "labels": _words()}


def _pairs() -> dict[str, Any]:
    return {"input_ids": _words(), "labels": _words(4, 12)}


def _classes() -> dict[str, Any]:
    return {"input_ids": _words(4, 32), "labels": torch.tensor([0, 1, 1, 0])}


_LLAMA = dict(vocab_size=_WORDS, **_SMALL, num_key_value_heads=1)
_MODELS_OF_TRANSFORMERS: dict[str, Make] = {
    "gpt2": _transformer(
        "GPT2LMHeadModel", _next_words, vocab_size=_WORDS, n_positions=64, n_embd=32, n_layer=2,
        n_head=2,
    ),
    "llama": _transformer("LlamaForCausalLM", _next_words, **_LLAMA),
    "mixtral": _transformer("MixtralForCausalLM", _next_words, **_LLAMA, num_local_experts=4),
    "qwen3": _transformer("Qwen3ForCausalLM", _next_words, **_LLAMA, head_dim=8),
    "qwen3_moe": _transformer(
        "Qwen3MoeForCausalLM", _next_words, **_LLAMA, head_dim=8, moe_intermediate_size=32,
        num_experts=4, num_experts_per_tok=2,
    ),
    "mamba": _transformer(
        "MambaForCausalLM", _next_words, vocab_size=_WORDS, hidden_size=32, num_hidden_layers=2,
        state_size=8,
    ),
    "rwkv": _transformer(
        "RwkvForCausalLM", _next_words, vocab_size=_WORDS, hidden_size=32, num_hidden_layers=2
    ),
    "bert": _transformer("BertForMaskedLM", _next_words, vocab_size=_WORDS, **_SMALL),
    "deberta": _transformer(
        "DebertaV2ForSequenceClassification", _classes, vocab_size=_WORDS, **_SMALL,
        relative_attention=True, pos_att_type=["p2c", "c2p"],
    ),
    "longformer": _transformer(
        "LongformerForSequenceClassification", _classes, vocab_size=_WORDS, **_SMALL,
        attention_window=[8, 8], max_position_embeddings=80,
    ),
    "xlnet": _transformer(
        "XLNetForSequenceClassification", _classes, vocab_size=_WORDS, d_model=32, n_layer=2,
        n_head=2, d_inner=64,
    ),
    "t5": _transformer(
        "T5ForConditionalGeneration", _pairs, vocab_size=_WORDS, d_model=32, d_kv=8, d_ff=64,
        num_layers=2, num_heads=4, decoder_start_token_id=0,
    ),
    "bart": _transformer(
        "BartForConditionalGeneration", _pairs, vocab_size=_WORDS, d_model=32, **_DEEP,
        max_position_embeddings=64,
    ),
    "whisper": _transformer(
        "WhisperForConditionalGeneration",
        lambda: {"input_features": torch.randn(2, 16, 100), "labels": _words(2, 12)},
        vocab_size=_WORDS, d_model=32, **_DEEP, max_source_positions=50, num_mel_bins=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    "vit_mae": _transformer(
        "ViTMAEForPreTraining", lambda: {"pixel_values": _image(4)}, **_SMALL, image_size=32,
        patch_size=8, decoder_hidden_size=32, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=64,
    ),
    "clip": _transformer(
        "CLIPModel",
        lambda: {"input_ids": _words(), "pixel_values": _image(4), "return_loss": True},
        text_config=dict(
            vocab_size=_WORDS, **_SMALL, max_position_embeddings=32, eos_token_id=2, bos_token_id=0
        ),
        vision_config=dict(**_SMALL, image_size=32, patch_size=8), projection_dim=16,
    ),
    "segformer": _transformer(
        "SegformerForSemanticSegmentation",
        lambda: {"pixel_values": _image(2, 3, 64), "labels": (_image(2, 1, 64)[:, 0] > 0).long()},
        hidden_sizes=[16, 16, 32, 32], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=32, num_labels=5,
    ),
    "patchtst": _transformer(
        "PatchTSTForPrediction",
        lambda: {"past_values": torch.randn(4, 32, 2), "future_values": torch.randn(4, 8, 2)},
        num_input_channels=2, context_length=32, prediction_length=8, patch_length=4,
        patch_stride=4, d_model=16, num_attention_heads=2, num_hidden_layers=2, ffn_dim=32,
    ),
}  # fmt: skip


# ---- PEFT, diffusers -----------------------------------------------------------------------------


def _adapted(kind: str, **options: Any) -> Make:
    def make() -> Trained:
        transformers, peft = map(importlib.import_module, ("transformers", "peft"))
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA))
        model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
        return _updates(model, lambda i: model(**_next_words()).loss)

    return make


_QUERIES = ["q_proj", "v_proj"]
_MODELS_OF_PEFT: dict[str, Make] = {
    "lora": _adapted("LoraConfig", r=4, target_modules=_QUERIES, lora_dropout=0.1),
    "dora": _adapted("LoraConfig", r=4, target_modules=_QUERIES, use_dora=True),
    "lora of all": _adapted("LoraConfig", target_modules="all-linear", modules_to_save=["lm_head"]),
    "lora of words": _adapted("LoraConfig", r=4, target_modules=["embed_tokens", "lm_head"]),
    "adalora": _adapted(
        "AdaLoraConfig", init_r=6, target_r=4, total_step=30, target_modules=_QUERIES
    ),
    "ia3": _adapted("IA3Config", target_modules=["k_proj"], feedforward_modules=[]),
    "vera": _adapted("VeraConfig", r=4, target_modules=_QUERIES),
    "prompts": _adapted("PromptTuningConfig", num_virtual_tokens=4),
}

_BLOCKS = {"block_out_channels": (16, 16), "norm_num_groups": 8}
_UNET = dict(sample_size=16, **_BLOCKS, layers_per_block=1, attention_head_dim=8)


def _denoised(kind: str, options: Mapping[str, Any], **given: Any) -> Make:
    def make() -> Trained:
        diffusers = importlib.import_module("diffusers")
        model, noises = getattr(diffusers, kind)(**options), diffusers.DDPMScheduler()
        image, generator = _image(side=16), _seeded()

        def loss(i: int) -> torch.Tensor:
            noise = torch.randn(image.shape, generator=generator)
            time = torch.randint(0, 1000, (2,), generator=generator)
            made = model(noises.add_noise(image, noise, time), time, **given).sample
            return F.mse_loss(made[:, :3], noise)

        return _updates(model, loss, clips=True)

    return make


def _autoencoder() -> Trained:
    model = importlib.import_module("diffusers").AutoencoderKL(
        block_out_channels=(16,), norm_num_groups=8, latent_channels=4
    )
    image = _image(side=16)

    def loss(i: int) -> torch.Tensor:
        latent = model.encode(image).latent_dist
        made = model.decode(latent.sample(generator=_seeded(i))).sample
        return F.mse_loss(made, image) + 1e-6 * latent.kl().mean()

    return _updates(model, loss)


_MODELS_OF_DIFFUSERS: dict[str, Make] = {
    "UNet2DModel": _denoised(
        "UNet2DModel",
        dict(_UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"))
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    ),
    "UNet2DConditionModel": _denoised(
        "UNet2DConditionModel",
        dict(_UNET, in_channels=3, out_channels=3, cross_attention_dim=16)
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        encoder_hidden_states=torch.ones(2, 5, 16),
    ),
    "DiTTransformer2DModel": _denoised(
        "DiTTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 3, "out_channels": 6}
        | {"num_layers": 2, "sample_size": 16, "patch_size": 2, "norm_num_groups": 1},
        class_labels=torch.tensor([0, 1]),
    ),
    "AutoencoderKL": _autoencoder,
}


# ---- images, graphs ------------------------------------------------------------------------------


def _classifier(name: str) -> Trained:
    model = importlib.import_module("timm").create_model(name, num_classes=10)
    known = model.default_cfg
    side = known["input_size"][-1] if known.get("fixed_input_size") or "vit" in name else 64
    images, labels = torch.randn(6, 3, side, side, generator=_seeded()), torch.arange(6)

    def loss(i: int) -> torch.Tensor:
        made = model(images)
        return F.cross_entropy(made[0] if isinstance(made, tuple) else made, labels)

    return _updates(model, loss)


class _OnGraph(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = getattr(importlib.import_module("torch_geometric.nn"), kind)
        options = {"K": 2} if kind == "ChebConv" else {}
        self.first, self.last = layer(8, 16, **options), layer(16, 3, **options)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(F.relu(self.first(x, edges)), edges)
        return out


def _graph_layer(kind: str) -> Trained:
    model, generator = _OnGraph(kind), _seeded()
    x = torch.randn(40, 8, generator=generator)
    edges = torch.randint(0, 40, (2, 160), generator=generator)
    return _updates(model, lambda i: F.cross_entropy(model(x, edges), torch.arange(40) % 3))


def _segmented(kind: str, side: int = 32, **options: Any) -> Make:
    def make() -> Trained:
        monai = importlib.import_module("monai")
        nets = importlib.import_module("monai.networks.nets")
        model = getattr(nets, kind)(spatial_dims=2, in_channels=1, out_channels=2, **options)
        criterion = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)
        image = _image(2, 1, side)
        return _updates(model, lambda i: criterion(model(image), (image > 0).long()))

    return make


_LEVELS = {"channels": (8, 16, 32), "strides": (2, 2)}
_MODELS_OF_MONAI: dict[str, Make] = {
    "UNet": _segmented("UNet", **_LEVELS, num_res_units=1),
    "AttentionUnet": _segmented("AttentionUnet", **_LEVELS),
    "SegResNet": _segmented("SegResNet", init_filters=8),
    "UNETR": _segmented(
        "UNETR", img_size=(32, 32), feature_size=8, hidden_size=32, mlp_dim=64, num_heads=4
    ),
    "SwinUNETR": _segmented("SwinUNETR", side=64, feature_size=12),
}


# ---- Gaussian processes, reinforcement learning --------------------------------------------------


def _process() -> Trained:
    gpytorch = importlib.import_module("gpytorch")
    x = torch.linspace(0, 1, 40)
    y = torch.sin(6 * x) + 0.1 * torch.randn(40, generator=_seeded())

    def forward(self: Any, x: torch.Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    exact = type("Exact", (gpytorch.models.ExactGP,), {"forward": forward})
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = exact(x, y, likelihood)
    model.mean = gpytorch.means.ConstantMean()
    model.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return _updates(model, lambda i: -marginal(model(x), y), lr=0.1)


def _agent(kind: str, environment: str, **options: Any) -> Make:
    def make() -> Trained:
        cls = getattr(importlib.import_module("stable_baselines3"), kind)
        agent = cls("MlpPolicy", environment, seed=0, device="cpu", **options)

        def step(i: int) -> float:
            agent.learn(64, reset_num_timesteps=False)
            return sum(p.double().sum().item() for p in agent.policy.parameters())

        return Trained(agent.policy, step)

    return make


_BUFFERED = {"learning_starts": 50}
_AGENTS: dict[str, Make] = {
    "PPO": _agent("PPO", "CartPole-v1", n_steps=64),
    "A2C": _agent("A2C", "CartPole-v1"),
    "DQN": _agent("DQN", "CartPole-v1", **_BUFFERED, train_freq=1),
    "SAC": _agent("SAC", "Pendulum-v1", **_BUFFERED),
    "TD3": _agent("TD3", "Pendulum-v1", **_BUFFERED),
}

#: How to make each model, by "library: name".
MODELS: dict[str, Make] = {
    f"{library}: {name}": make
    for library, models in {
        "transformers": _MODELS_OF_TRANSFORMERS,
        "peft": _MODELS_OF_PEFT,
        "diffusers": _MODELS_OF_DIFFUSERS,
        "timm": {name: functools.partial(_classifier, name) for name in _TIMM.split()},
        "torch_geometric": {
            name: functools.partial(_graph_layer, name) for name in _GRAPH_LAYERS.split()
        },
        "monai": _MODELS_OF_MONAI,
        "gpytorch": {"ExactGP": _process},
        "stable_baselines3": _AGENTS,
    }.items()
    for name, make in models.items()
}

#: What fastcheck says of them, and is so: a regular expression of the beginning of the text.
TRUE_WARNINGS = {
    # Nothing of a mask and of segments is given.
    "transformers: xlnet": "no gradient: transformer.mask_emb",
    # The class is made of the first word, which has global attention in place of the local one.
    "transformers: longformer": "gradients that are all 0: of longformer.encoder.layer.1",
    # A weight of further layers, of which there are none.
    "torch_geometric: ARMAConv": "no gradient: first.weight, last.weight",
    # It is added to the argument of a softmax over one element: images of 64 pixels are small.
    "timm: efficientvim_m1": "gradients that are all 0: of stages.2.blocks.0.mixer.A",
    # Its attention over places has nn.LayerNorm(1).
    "timm: csatv2": "step 20: in the graph of the loss layer_norm normalises one element at",
    # The loss of the returns rises with the length of the episodes.
    "stable_baselines3: A2C": r"step [\d,]+: the loss is [\d.,]+ \(usually",
}
