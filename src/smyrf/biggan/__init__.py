"""The paper's image experiments: BigGAN whose attention is any of ours."""
