"""Facts: what each project calls its tensors, and their shapes; and such tensors at random."""

import math

import torch


def layer(name, *shape, bias=True):
    return {f"{name}.weight": shape, **({f"{name}.bias": shape[:1]} if bias else {})}


def dit_shapes(*, width=64, depth=2, patch=2, channels=4, side=4, rows=8, sigma=True, ratio=4, **_):
    out = patch**2 * channels * (2 if sigma else 1)
    shapes = {
        "pos_embed": (1, side**2, width),
        **layer("x_embedder.proj", width, channels, patch, patch),
        **layer("t_embedder.mlp.0", width, 256),
        **layer("t_embedder.mlp.2", width, width),
        **layer("final_layer.linear", out, width),
        **layer("final_layer.adaLN_modulation.1", 2 * width, width),
    }
    if rows:
        shapes["y_embedder.embedding_table.weight"] = (rows, width)
    for i in range(depth):
        shapes |= layer(f"blocks.{i}.attn.qkv", 3 * width, width)
        shapes |= layer(f"blocks.{i}.attn.proj", width, width)
        shapes |= layer(f"blocks.{i}.mlp.fc1", ratio * width, width)
        shapes |= layer(f"blocks.{i}.mlp.fc2", width, ratio * width)
        shapes |= layer(f"blocks.{i}.adaLN_modulation.1", 6 * width, width)
    return shapes


def lightning_dit_shapes(*, width=64, depth=2, heads=4, norms=True, side=4, **sizes):
    shapes = dit_shapes(width=width, depth=depth, side=side, **{"sigma": False, **sizes})
    inner = int(2 / 3 * 4 * width)
    for name in ("cos", "sin"):
        shapes[f"feat_rope.freqs_{name}"] = (side**2, width // heads)
    shapes["final_layer.norm_final.weight"] = (width,)
    for i in range(depth):
        for part in ("weight", "bias"):
            del shapes[f"blocks.{i}.mlp.fc1.{part}"], shapes[f"blocks.{i}.mlp.fc2.{part}"]
        shapes |= layer(f"blocks.{i}.mlp.w12", 2 * inner, width)
        shapes |= layer(f"blocks.{i}.mlp.w3", width, inner)
        shapes |= {f"blocks.{i}.norm{j}.weight": (width,) for j in (1, 2)}
        if norms:
            shapes |= {f"blocks.{i}.attn.{j}_norm.weight": (width // heads,) for j in "qk"}
    return shapes


def halves(depth):
    half = range(depth // 2)
    return [*(f"in_blocks.{i}" for i in half), "mid_block", *(f"out_blocks.{i}" for i in half)]


def uvit_shapes(*, width=64, depth=4, patch=2, channels=4, side=4, rows=8, ratio=4, conv=True, **_):
    shapes = {
        "pos_embed": (1, side**2 + (2 if rows else 1), width),
        **layer("patch_embed.proj", width, channels, patch, patch),
        **layer("norm", width),
        **layer("decoder_pred", patch**2 * channels, width),
    }
    if rows:
        shapes["label_emb.weight"] = (rows, width)
    if conv:
        shapes |= layer("final_layer", channels, channels, 3, 3)
    else:  # no published one has both
        shapes |= layer("time_embed.0", 4 * width, width)
        shapes |= layer("time_embed.2", width, 4 * width)
    for name in halves(depth):
        shapes |= {
            **layer(f"{name}.norm1", width),
            **layer(f"{name}.attn.qkv", 3 * width, width, bias=False),
            **layer(f"{name}.attn.proj", width, width),
            **layer(f"{name}.norm2", width),
            **layer(f"{name}.mlp.fc1", ratio * width, width),
            **layer(f"{name}.mlp.fc2", width, ratio * width),
        }
        if name.startswith("out"):
            shapes |= layer(f"{name}.skip_linear", width, 2 * width)
    return shapes


def dis_shapes(
    *, width=48, depth=4, patch=2, channels=4, side=4, rows=8, sigma=True, state=16, **_
):
    inner, rank = 2 * width, math.ceil(width / 16)
    shapes = {
        "pos_embed": (1, side**2 + (2 if rows else 1), width),
        **layer("patch_embed.proj", width, channels, patch, patch),
        **layer("time_embed.0", 4 * width, width),
        **layer("time_embed.2", width, 4 * width),
        "norm_f.weight": (width,),
        **layer("final_layer.linear", patch**2 * channels * (2 if sigma else 1), width),
    }
    if rows:
        shapes["label_emb.embedding_table.weight"] = (rows, width)
        shapes |= layer("final_layer.adaLN_modulation.1", 2 * width, width)
    for name in halves(depth):
        shapes |= {
            f"{name}.norm.weight": (width,),
            f"{name}.mixer.in_proj.weight": (2 * inner, width),
            f"{name}.mixer.out_proj.weight": (width, inner),
        }
        for back in ("", "_b"):
            shapes |= {
                f"{name}.mixer.conv1d{back}.weight": (inner, 1, 4),
                f"{name}.mixer.conv1d{back}.bias": (inner,),
                f"{name}.mixer.x_proj{back}.weight": (rank + 2 * state, inner),
                f"{name}.mixer.dt_proj{back}.weight": (inner, rank),
                f"{name}.mixer.dt_proj{back}.bias": (inner,),
                f"{name}.mixer.{'A_b_log' if back else 'A_log'}": (inner, state),
                f"{name}.mixer.D{back}": (inner,),
            }
        if name.startswith("out"):
            shapes |= layer(f"{name}.skip_linear", width, 2 * width)
    return shapes


def drwkv_shapes(
    *, width=64, depth=5, patch=2, channels=4, side=4, rows=8, sigma=True, ratio=4, **_
):
    shapes = {
        "pos_embed": (1, side**2, width),
        **layer("patch_embed.proj", width, channels, patch, patch),
        **layer("time_embed.mlp.0", width, 256),
        **layer("time_embed.mlp.2", width, width),
        **layer("in_blocks.0.ln0", width),
        **layer("norm_f", width),
        **layer("final_layer.linear", patch**2 * channels * (2 if sigma else 1), width),
        **layer("final_layer.adaLN_modulation.1", 2 * width, width),
    }
    if rows:
        shapes["label_emb.embedding_table.weight"] = (rows, width)
    for name in halves(depth):
        shapes |= layer(f"{name}.ln1", width) | layer(f"{name}.ln2", width)
        shapes |= layer(f"{name}.adaLN_modulation.1", 6 * width, width)
        for part in ("spatial_decay", "spatial_first"):
            shapes[f"{name}.att.{part}"] = (width,)
        for part in ("att.spatial_mix_k", "att.spatial_mix_v", "att.spatial_mix_r",
                     "ffn.spatial_mix_k", "ffn.spatial_mix_r"):  # fmt: skip
            shapes[f"{name}.{part}"] = (1, 1, width)
        for part in ("att.key", "att.value", "att.receptance", "att.output", "ffn.receptance"):
            shapes[f"{name}.{part}.weight"] = (width, width)
        shapes[f"{name}.ffn.key.weight"] = (ratio * width, width)
        shapes[f"{name}.ffn.value.weight"] = (width, ratio * width)
        if name.startswith("out"):
            shapes |= layer(f"{name}.skip_linear", width, 2 * width)
    return shapes


def zigma_shapes(*, width=48, depth=4, patch=2, channels=4, side=4, rows=8, state=16, **_):
    inner, rank = 2 * width, math.ceil(width / 16)
    shapes = {
        "pos_embed": (1, side**2, width),
        **layer("x_embedder.proj", width, channels, patch, patch),
        **layer("t_embedder.mlp.0", width, 256),
        **layer("t_embedder.mlp.2", width, width),
        "norm_f.weight": (width,),
        **layer("final_layer.linear", patch**2 * channels, width),
    }
    if rows:
        shapes["y_embedder.embedding_table.weight"] = (rows, width)
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.norm.weight": (width,),
            **layer(f"blocks.{i}.adaLN_modulation.1", 3 * width, width),
            f"blocks.{i}.mixer.in_proj.weight": (2 * inner, width),
            **layer(f"blocks.{i}.mixer.conv1d", inner, 1, 4),
            f"blocks.{i}.mixer.x_proj.weight": (rank + 2 * state, inner),
            **layer(f"blocks.{i}.mixer.dt_proj", inner, rank),
            f"blocks.{i}.mixer.A_log": (inner, state),
            f"blocks.{i}.mixer.D": (inner,),
            f"blocks.{i}.mixer.out_proj.weight": (width, inner),
        }
    return shapes


SHAPES = {
    "dit": dit_shapes,
    "sit": dit_shapes,
    "tread": dit_shapes,
    "uvit": uvit_shapes,
    "dis": dis_shapes,
    "drwkv": drwkv_shapes,
    "lightning_dit": lightning_dit_shapes,
    "zigma": zigma_shapes,
}


def sines(width, side):
    """Column, then row: each sines, then cosines, of place / 10000^(2i / (width / 2))."""
    quarter = width // 4
    rows = []
    for token in range(side**2):
        row = []
        for place in (token % side, token // side):
            angles = [place / 10000 ** (i / quarter) for i in range(quarter)]
            row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        rows.append(row)
    return torch.tensor(rows)[None]


def rotations(width, side):
    """Angles of places in a head: the row's, then the column's, each of them twice in a row."""
    quarter = width // 4
    rows = []
    for token in range(side**2):
        row = []
        for place in (token // side, token % side):
            for i in range(quarter):
                row += 2 * [place / 10000 ** (i / quarter)]
        rows.append(row)
    return torch.tensor(rows)


def theirs(name, **sizes):
    """A state dict of that project with random values."""
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES[name](**sizes)
    tensors = {}
    for key, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 1 / math.sqrt(math.prod(shape[1:]))
        tensors[key] = scale * torch.randn(shape, generator=generator)
    if SHAPES[name] in (dit_shapes, lightning_dit_shapes):
        width, tokens = shapes["pos_embed"][2], shapes["pos_embed"][1]
        tensors["pos_embed"] = sines(width, math.isqrt(tokens))
    if name == "lightning_dit":
        tokens, width = shapes["feat_rope.freqs_cos"]
        angles = rotations(width, math.isqrt(tokens))
        tensors |= {"feat_rope.freqs_cos": angles.cos(), "feat_rope.freqs_sin": angles.sin()}
    return tensors
