"""The MTP layer that tools.train_demo_model adds to the bundled model, as molink runs it."""

from pathlib import Path

import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.stage.batch import MtpInput, SequenceRows, StageInput
from molink.stage.stage import Stage
from tools.demo_model.mtp_layer import MtpLayer, predict_ahead, save_mtp_layer
from tools.demo_model.network import load_network
from tools.train_demo_model import FOLDER

TOKENS, AHEAD = 20, 3


def test_training_runs_the_layer_as_molink_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = load_network(FOLDER)
    trained = MtpLayer(network)
    for parameter in trained.parameters():
        parameter.data = (parameter.data + 0.02 * torch.randn_like(parameter)).bfloat16().float()
    save_mtp_layer(trained, FOLDER, tmp_path / "made")
    ids = torch.randint(300, 2000, (1, TOKENS + AHEAD))
    with torch.inference_mode():
        rows = network.model(ids[:, :TOKENS]).last_hidden_state
        expected = [made[0, -1] for made in predict_ahead(trained, network, rows, ids, AHEAD)]

    folder = ModelFolder.open(tmp_path / "made")
    stage = Stage.load_layers(folder, (0, folder.config.layers), "cpu", "f32")
    stage.allocate_kv_pool(4, 16)
    blocks, given = (2, 0), ids[0].tolist()
    whole = SequenceRows(0, TOKENS, blocks)
    output = stage.compute_step(StageInput(ids[0, :TOKENS], None, (whole,)))
    assert output.normed is not None
    batch = MtpInput(output.normed, given[1 : TOKENS + 1], (whole,), (TOKENS - 1,))
    for position, wanted in enumerate(expected, TOKENS):
        made = stage.predict_tokens(batch)
        torch.testing.assert_close(made.normed[0], wanted, atol=1e-3, rtol=1e-3)
        row = SequenceRows(position, 1, blocks)
        batch = MtpInput(made.normed, given[position + 1 : position + 2], (row,), (0,))
