# docker build -t cnnexp .                                    CPU
# docker build -t cnnexp:gpu --build-arg EXTRAS=[gpu] .       with the GPU backends (run with --gpus all)
# docker run --rm -v "$PWD/outputs:/home/cnnexp/outputs" cnnexp model=two_conv_mlp trainer.epochs=3
FROM python:3.12-slim

ARG EXTRAS=""
RUN useradd --create-home cnnexp
COPY . /source
RUN pip install --no-cache-dir --constraint /source/constraints.txt "/source${EXTRAS}" && rm -rf /source

USER cnnexp
WORKDIR /home/cnnexp
ENTRYPOINT ["cnnexp"]
