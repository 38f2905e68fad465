# docker build -t megatron-offload . && docker run --rm --gpus all --ipc host megatron-offload
FROM pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime

# The image is the environment; it holds no other program to be broken.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY megatron_offload megatron_offload
RUN pip install '.[megatron,report]'

RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
COPY examples examples

# Nothing is fetched at run time.
ENV HF_HUB_OFFLINE=1
CMD ["megatron-offload", "doctor"]
