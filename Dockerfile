# tread-zoo on NVIDIA GPUs. Written without Docker at hand: it has not been built or run yet.
#
#   docker build -t tread-zoo .
#   docker run --gpus all --ipc=host -v "$PWD:/work" tread-zoo train backbone=mamba
#   docker run --gpus all --ipc=host -v "$PWD:/work" --entrypoint accelerate tread-zoo \
#     launch --multi_gpu -m tread_zoo train backbone=dit
FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

# Triton compiles its launchers with the system's C compiler, against Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

# The image's own Python has torch, and is marked as managed by Debian.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
COPY . /src
# Its torch stays: a package that asks for another one is an error here, not a second CUDA.
RUN pip list --format=freeze | grep -E '^(torch|torchvision|triton)==' > /torch.txt \
    && pip install --constraint /torch.txt "/src[cuda,latents]" && rm -rf /src

# Runs and data lie in the mounted folder; what is downloaded, in its .cache.
ENV HF_HOME=/work/.cache/huggingface TORCH_HOME=/work/.cache/torch
WORKDIR /work
ENTRYPOINT ["tread-zoo"]
