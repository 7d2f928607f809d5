# DeepSeek-V3 (arXiv 2412.19437, section 4.2) on 2,048 H100, bf16.
torchrun --nproc-per-node 8 --nnodes 256 pretrain_gpt.py \
  --num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 \
  --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
  --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
  --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 \
  --moe-layer-freq '([0]*3+[1]*58)' --moe-grouped-gemm --moe-token-dispatcher-type alltoall --mtp-num-layers 1 \
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 129280 \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64 \
  --pipeline-model-parallel-layout 'Et*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|tmL' \
  --micro-batch-size 1 --global-batch-size 15360 --bf16 --use-distributed-optimizer \
  --overlap-grad-reduce --overlap-param-gather --use-flash-attn --transformer-impl transformer_engine
