"""The quality of quantized weights, on a few held-out conversations."""

from molink.checkpoint.model_folder import ModelFolder
from tools.demo_model.tokenizer import encode_conversations, load_tokenizer, mark_answers
from tools.demo_model.train import select_conversations
from tools.measure_quantization import MODES, measure_model
from tools.train_demo_model import FOLDER


def test_quantized_weights_cost_little_quality() -> None:
    tokenizer = load_tokenizer(FOLDER)
    texts = encode_conversations(tokenizer, select_conversations("held_out", 6, 7))
    masks = [mark_answers(tokenizer, text) for text in texts]
    exact, *others = measure_model(ModelFolder.open(FOLDER), texts, masks, list(MODES))
    assert (exact.agreement, exact.divergence) == (1.0, 0.0)
    for row in others:
        coarse = row.mode.startswith("nf4")
        assert row.divergence < (0.01 if coarse else 0.001)
        assert row.perplexity < exact.perplexity * (1.02 if coarse else 1.002)
        assert row.agreement > (0.95 if coarse else 0.99)
        # Exact weights may stay in the file's bf16, so modes with bf16 rows don't need fewer bytes.
        quantized = row.mode.startswith(("int8", "nf4")) and "KV" not in row.mode
        assert row.layer_bytes <= exact.layer_bytes * (0.6 if quantized else 1.0)
