"""The bits that peers must agree on, as literal hashes, under every vector unit that torch and numpy can choose.

Run as a program, this file prints the digests of the interpreter it runs in; with `numpy`, without native loops.
"""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from p2ptrain.algorithms import kernels
from p2ptrain.algorithms.averaging import disjoint_mean, weighted_mean
from p2ptrain.algorithms.codec import codec
from p2ptrain.algorithms.fragments import fresh_blocks, slot_blocks
from p2ptrain.algorithms.outer import OUTER_OPTIMIZERS, outer_step
from p2ptrain.algorithms.robust import clipped_mean, geometric_median, trimmed_mean

NUM_BLOCKS = 1500  # more than one chunk of the codec and of the outer step
CODECS = {
    "int8": codec("int8"),
    "int4": codec("int4"),
    "int2": codec("int2"),
    "fp16": codec("fp16"),
    "none": codec("none"),
    "pruned": codec("int8", prune_fraction=0.5),
    "topk": codec("topk"),
}

GOLDEN = {
    "input": "24ecc7a17a62a2f6b085da3946e8ac4914a791edb6bb594283c2d72a05358572",
    "int8 encode": "f3b3405ad5f7d4b1925d1c91de8819c8d347c3018446cdebc37244bd6494110d",
    "int8 decode": "976bb5dfaf75353db1dfc06df6648fc82a33ace645313fe153d998b9b86c0835",
    "int8 weighted_mean": "18293fb11562b7752c16a91d12aace1454dc7a86bcc690b95291219731771511",
    "int8 disjoint_mean": "9d051ecbbbac0f5a40cb85fdeb2ce4c471a5ca90db665fd107e527a67f9ec902",
    "int8 clipped_mean": "e8fe47b1b11dc280097ccebff10652198905e6ad64b7b3f5fee75a6b2895fee3",
    "int8 trimmed_mean": "f1211d8835881615a6b45a83cb1810234a7cf4f01cf9f682ee4a3d2b9b8ea888",
    "int8 geometric_median": "28c030481cf76ab8d5463937910911465eaaa53cf95481e08cbc9e50d4e16589",
    "int8 outer_step": "6c1eced7f2e8494e5fcd2183dffc8ea37d3843ebce76f90891ce114f1102f88a",
    "int4 encode": "3e530bd57c4281869c693f64d232289d5376e0cceeddcf7e312a179c96022cba",
    "int4 decode": "76bf60d8d5bee98c836154c5184dc044735544a588e8e404154d60e9b107af13",
    "int4 weighted_mean": "af3c23d431caee38cfe904d069a4b71cfb4f4e8c00f970610d736054af526cdd",
    "int4 disjoint_mean": "f758b2b3a6da5ba119a7996dd0ebf1a0ac9c320833d175c91383216aa5797edf",
    "int4 clipped_mean": "c2bcc07dda2099b5af09e55c37da953b084681b035e1472a4321c07d90fafa99",
    "int4 trimmed_mean": "d8764af38ec79d8319a5bd5b7bf55d11fa134e74b040853b4ad78e2d01b49b93",
    "int4 geometric_median": "0bc35d3fc59eb5cd2206a7ba40c00cd572ff44c6be93e1e14e33e113aabfbe54",
    "int4 outer_step": "b1aaeb1b9ad41aedbf9e84061d6c3b78fc57eb1b8598843b0480f29c7139353d",
    "int2 encode": "ff6d5a95d14b929bd29de21c972a32e634e90f40298dd9a14146d45adf147219",
    "int2 decode": "088d1fbe398ab21875e5ba995060804a654bdc14f4eb39cd2df8db82aaaf3430",
    "int2 weighted_mean": "11abbb4dda30a01d749090c9f7854e6e6a9be215d18af8580c57c5ef259bc1e5",
    "int2 disjoint_mean": "3ffa5a94585ed471b6ce65665c10894711c3d5241ef3e357a9f493e5cf8d509d",
    "int2 clipped_mean": "2d1c8d429b1587d2a28a06eb87c8f515362d87ac4d3e5f307c7ca0d6b0510961",
    "int2 trimmed_mean": "0d81905b64960f3ba68932437b2875913b67a7c614ee78b5f0b3e25ce301f7bf",
    "int2 geometric_median": "3e1770bf097379a75bef52c4c475ac942bf0cd993eb53a2d9c7f5eb9ee9e95d9",
    "int2 outer_step": "8a0de355cf12fe9651049b34892305711ce0f9d9dc86ea09eaf1506b96d80c8e",
    "fp16 encode": "aa398212df0480558fd192cb09e60b1e9179f36539f6a694562f572fc940c98b",
    "fp16 decode": "875b3790bc2274ceedbb6bb9962d4ecb7fd81084c81c437a0cac5a89a1dd4181",
    "fp16 weighted_mean": "d5ccad399e609a0de452b9ef59a0f612f32daf2891c6ae30225e0c15cb625369",
    "fp16 disjoint_mean": "c891c9cf45c88a2acbf4dc0448f2e052923b1795b418c2694db78e7723f4d48f",
    "fp16 clipped_mean": "158cfff9c4af3ec74f585c382ce72a9d6f14db7f8c0ace27bc33b695ff6776ab",
    "fp16 trimmed_mean": "50de032d96d44c5370cf7e616c465defb8b175e4860e975b8f371da171af9214",
    "fp16 geometric_median": "85d7d88e665e4ef9b336ba3077170e96830135b9806f9f006b1bdc69a967d0ac",
    "fp16 outer_step": "44ef5eba6878e57b2ba05cff7aa539771b606a03fd1a2c8b00fdddcd92322e60",
    "none encode": "adcea13069db2d2d1e7cb2fb607fa1dc149c9ee861d84d24dea37e62ad58c7f8",
    "none decode": "adcea13069db2d2d1e7cb2fb607fa1dc149c9ee861d84d24dea37e62ad58c7f8",
    "none weighted_mean": "18df2894fbbb4d06f230ced54fbf0b822fabe7eb336cda2fc88b1f1851d74b14",
    "none disjoint_mean": "5ce951893eba1884d86a52a25b4ada17662b67eaed940dc5e5ac3e20531fc62f",
    "none clipped_mean": "51d12a87d7e9aed4ec79af70b0dfbaabaed4b9ad73d5dcad53a2bfb9098d795a",
    "none trimmed_mean": "21a4ed30ec817d0965b0493268a6f3edd18cf550c990ba5e8ae7abc833ba928c",
    "none geometric_median": "03315dd347f3a272cd5fcb5a152b050fe4b53e4dbe652dd75e25b93488d9d421",
    "none outer_step": "6d2e31c5ea34c7498ad2b7b49c75aed3f845b6ccdef2f3eb9e9f7b3b9bba574c",
    "pruned encode": "6d8496def82ce91e21fdbc613e2631eba677460688bbab618747d9bd72ef8770",
    "pruned decode": "1493b398f10cf9b9267bad8e5f9c8eb16dd35b2d8713e7ee650208d91f258d53",
    "pruned weighted_mean": "3ee0326fa6e651fb2c399f1d35cefc4d084e7316440852fbea0757aa16d6ec77",
    "pruned disjoint_mean": "f9988766f57c755ba2ab8a0c4045fe0170d4d663dd5ffed9314dcc111d589980",
    "pruned clipped_mean": "5d8a54a151b612629f770421635469f7ed3fd55bacda6b7049ec550d5e53c463",
    "pruned trimmed_mean": "aa37bd93ad82d5be9cb0f88545c2c515cf3ee2cfc469afd4d02973289cd06fd7",
    "pruned geometric_median": "29561a264aa49fa35a6ba01b37ed4041353701e3b3bd7b3ad689bc3ea29b17f1",
    "pruned outer_step": "e3a5202621362e17fccf0b2ecec34fa37270a7f7e089471496f3ee5dd835b775",
    "topk encode": "96b2fd2dbf77d1e72f7657c9543b77ef57d185ebbd58b992d2622c7880f6c661",
    "topk decode": "3cf8f6e2743a5d299e31b7feeb4feb04f572912e40c3e56a09c4709f35ce0eab",
    "topk weighted_mean": "68ac63c99de2a1d60ab4c53e8f906f81451b0edb22f6223211bb14dd7cc9291c",
    "topk disjoint_mean": "e45ba35529cf34a6fb9ead379c34ec48e97ef567d0645865ac5665c812c84d36",
    "topk clipped_mean": "d56ab4fa0dc2122eaf3f48d8300120fa13193d0fc1c8effe23b40bf532601eff",
    "topk trimmed_mean": "97a76aed9e93ad50534343562edafbb002742e1bdd669345e820d350248a5e86",
    "topk geometric_median": "ab61017e6657a38567696901dc0d533023d69ca7dbc6f25d0e21b55353838ac3",
    "topk outer_step": "375bb8a0700a5877bacdf383a168bf709d64cd9f078037dce7d25f6abe45d045",
    "outer sgd": "b1e6a91d3efd409b74bfec9ee4f7b75b2efd6999672f1071bfa3d7bafb7a600b",
    "outer sgdm": "65bb6680051ad2ff11d26efadce974d4354e9b00f8b16b1149b7899499af4f3f",
    "outer nesterov": "ece59a217770a49daa2840c110a0bea9d8b01448ae54775f06977c46e425ca7d",
    "outer adam": "87cdff3f46ef1aebcf3e9cddc27a3a5f2d9a248b82882e7e8756ef856922c3fb",
    "slot_blocks": "42e6477d3d4ce0e9391fd5c00dddde9768bd5d8a8e07aebb488b6a350dbf206d",
    "fresh_blocks": "9dcb118c0414185acce96b25bb1d28fba8bc55353e245e03562b6d48c51831d0",
}

# numpy's names of vector units; numpy ignores those that the build or the machine does not have.
NUMPY_UNITS = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
ENVIRONMENTS = [
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "avx512"},
    {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": NUMPY_UNITS},
]


def integer_blocks(seed: int) -> np.ndarray:
    """(NUM_BLOCKS, 64) float32 from integer arithmetic alone: SplitMix64 as sign and mantissa, exponents by block.

    Block 0 is zero, block 1 subnormal, block 2 beyond half precision.
    """
    words = np.arange(NUM_BLOCKS * 64, dtype=np.uint64) + np.uint64(seed << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words = (words ^ (words >> np.uint64(31))).reshape(NUM_BLOCKS, 64)
    exponents = 127 - 20 + np.arange(NUM_BLOCKS, dtype=np.uint64)[:, None] % 24 + (words >> np.uint64(60)) % 4
    exponents[1], exponents[2] = 0, 127 + 17
    bits = ((words & np.uint64(1)) << np.uint64(31)) | (exponents << np.uint64(23)) | (words >> np.uint64(20)) % 2**23
    bits[0] = 0
    return bits.astype(np.uint32).view(np.float32)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digests() -> dict[str, str]:
    found = {"input": digest(integer_blocks(1).astype("<f4").tobytes())}
    for name, chosen in CODECS.items():
        encoded = [chosen.encode(integer_blocks(seed)) for seed in (1, 2, 3)]
        decoded = [chosen.decode(data, NUM_BLOCKS) for data in encoded]
        weighted = list(zip(encoded, [3.0, 1.0, 7.0], strict=True))
        mean = weighted_mean(weighted, chosen, NUM_BLOCKS)
        anchor, momentum = integer_blocks(4), integer_blocks(5)
        for gradient in (mean, *decoded):
            outer_step("nesterov", anchor, [momentum], gradient, lr=0.7, momentum=0.9, round_=0)
        outer_step("sgd", anchor, [momentum], mean, lr=1.0, momentum=0.0, round_=0)
        found[f"{name} encode"] = digest(b"".join(encoded))
        found[f"{name} decode"] = digest(np.stack(decoded).astype("<f4").tobytes())
        found[f"{name} weighted_mean"] = digest(mean.astype("<f4").tobytes())
        found[f"{name} disjoint_mean"] = digest(disjoint_mean(weighted, chosen, NUM_BLOCKS).astype("<f4").tobytes())
        for robust in (clipped_mean, trimmed_mean, geometric_median):
            found[f"{name} {robust.__name__}"] = digest(robust(weighted, chosen, NUM_BLOCKS).astype("<f4").tobytes())
        found[f"{name} outer_step"] = digest(np.stack([anchor, momentum]).astype("<f4").tobytes())
    for name, optimizer in OUTER_OPTIMIZERS.items():
        anchor, *moments = (integer_blocks(4 + i) for i in range(1 + optimizer.num_moments))
        moments[1:] = [np.abs(moment) for moment in moments[1:]]
        for round_ in (0, 1, 700):
            gradient = integer_blocks(7 + round_)
            outer_step(name, anchor, moments, gradient, lr=optimizer.lr, momentum=optimizer.momentum, round_=round_)
        found[f"outer {name}"] = digest(np.stack([anchor, *moments]).astype("<f4").tobytes())
    cyclic = np.concatenate([slot_blocks(1, 2, slot, 1, 200, 1_944_372) for slot in (0, 77, 199)])
    found["slot_blocks"] = digest(cyclic.astype("<i8").tobytes())
    found["fresh_blocks"] = digest(fresh_blocks(1, 2, 3, 200, 1_944_372).astype("<i8").tobytes())
    return found


def test_digests_here() -> None:
    assert digests() == GOLDEN


@pytest.mark.processes
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=["default", "avx2", "avx512", "no-vectors"])
def test_digests_under_every_vector_unit(environment: dict[str, str], arithmetic: str) -> None:
    result = subprocess.run(
        [sys.executable, __file__, arithmetic],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == GOLDEN


if __name__ == "__main__":
    if sys.argv[1:] == ["numpy"]:
        kernels.library = lambda: None  # type: ignore[assignment]
    print(json.dumps(digests(), indent=4))
