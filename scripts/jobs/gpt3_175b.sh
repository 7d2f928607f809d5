# GPT-3 175B (arXiv 2005.14165, table 2.1) on 1,024 A100: the job of Megatron-LM's 2021 paper.
torchrun --nproc-per-node 8 --nnodes 128 pretrain_gpt.py \
  --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
  --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel \
  --micro-batch-size 1 --global-batch-size 1536 --bf16 --use-distributed-optimizer \
  --overlap-grad-reduce --overlap-param-gather --use-flash-attn --transformer-impl transformer_engine
