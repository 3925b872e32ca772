"""All config keys with units and defaults; the other config files override some of them.

The `name` of a section selects a class, and the other keys are its arguments. The names are listed
in the `__init__.py` of the package's folders. On the command line: --config.train.batch_size=64.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The defaults: MD4 on text8 at the paper's size."""
    return ConfigDict(
        dict(
            data=dict(
                name="text8",  # text8 | text | public | mixture | ...: docs/data.md; docs/images.md
                path=None,  # file of the data set; None: look in the cache, then download
                length=256,  # tokens per sequence
                separate_documents=False,  # attention stays within a packed document
                windows="grid",  # sequences: grid, adjacent | every, at every offset | documents
                padding="hidden",  # after a document that is a sequence: hidden | end_of_text
                turns="all",  # answers of a conversation that count: all | last | each
                chat_template="",  # folder or file of its template; '': the tokenizer's
                store="",  # directory for the tokens of large texts, also gs://; '': the cache
                detokenise="",  # rules that undo word tokenisation: wikitext | ptb | lm1b | ...
                autoencoder="",  # folder that turns images into codes (docs/images.md); '': pixels
                autoencoder_pixels="auto",  # black and white of it: auto | unit | signed
            ),
            tokenizer=dict(
                name="text8",  # text8 | characters | bytes | bpe | proteins
            ),
            process=dict(
                # masking(schedule) | state_dependent(initial_power) |
                # uniform(schedule, parametrisation) | hybrid(uniform, gamma) |
                # rates(schedule, kernel, parametrisation, rate_width, stationary_width) |
                # transition(schedule, timesteps, kernel, beta_start, beta_end, parametrisation) |
                # insertion(schedule, insertion) | deletion(schedule) | edits(schedule, masks), with
                # network.gaps, and edits with network.edits too |
                # resizing(schedule, expand, delete), for objective dreamon |
                # gaussian_masking(schedule, confusion_start, confusion_end, parametrisation) |
                # metric_path(power, table, scale, exponent, offset, parametrisation) |
                # partial_masking(schedule, parts, shuffle), with network.name="sub_tokens"
                name="masking",
                # linear | polynomial(power) | power(exponent) | cosine | shifted_cosine(shift) |
                # geometric(minimum, maximum) | exponential(scale, exponent) | log_linear(eps) |
                # clipped(eps)
                schedule=dict(name="linear"),
                conditioning="time",  # time input of the network: time | alpha | sigma | zero
            ),
            objective=dict(
                # md4 | md4_discrete(timesteps, ...) | any_order(weight_power, max_masked) |
                # t_dce(drawn_constant) | lambda_dce | along_order(order) |
                # block(block, draws, low, high, weights) | every_order(block, orders), for
                # block diffusion |
                # autoregressive, with network.causal=True and sample.name="left_to_right" |
                # score_entropy(scaled) | genmd4(first_time), with process state_dependent |
                # uniform_elbo(block) | cross_entropy(block) | duo(until, ...), with uniform |
                # generalized_kl, with process uniform or metric_path |
                # concrete_score(form, time), with process uniform |
                # ctmc(passes, first_time, cross_entropy), with process rates |
                # gidd(weights, largest), with process hybrid |
                # d3pm(timesteps, cross_entropy, decoder), with process masking, uniform,
                # hybrid or transition
                # sdtt(steps, round_steps, per_step, divergence), with process masking, and
                # dcd(steps, round_steps, low, high, ...), with uniform: distillation of the
                # model in train.initial
                # preference(beta, draws, supervised), with data.rejected_key: preference learning
                # from chosen and rejected answers, starting from the model in train.initial
                # reparameterized(timesteps, weights), the loss of DPLM
                # proseco(correction, weighted, fill, everywhere, upweighted, least_time), with
                # sample.name="proseco": masks, and corrections of the network's own tokens
                # prism(quality, tokens, texts, fill, order, least_time), with network.quality and
                # sample.name="prism": masks, and which tokens of the network are right
                # policy(group, kl, draws, normalised, updates, clip_below, clip_above), with
                # sample.reward: reinforcement learning
                # flexmdm, with process insertion, edit_flow, with deletion, and masked_edit_flow,
                # with edits: texts of variable length
                # partition, with network.name="partition"
                # candi(form), with process gaussian_masking
                # prime(form), with process partial_masking and network.name="sub_tokens"
                # eso(alpha_0, split), and its bound eso_orders(orders), with sample.name="eso" and
                # network.time_conditioning=False
                # wedlm(block_size, left_to_right, weights), with sample.name="streaming" and
                # network.time_conditioning=False
                # sdlm(block_size, draws), the same with sample.name="longest_prefix"
                # dreamon(merge, merge_evenly, most_deleted, deletions), with process resizing
                # classifier: predicts the label of a noisy sequence, not a model of the data
                name="md4",
            ),
            network=dict(
                # transformer | partition | sub_tokens | modernbert | lfm2 | esm | diffusion_gemma |
                # encoder_decoder | classifier; for images: unet | uvit | dit | dit_classifier; for
                # their codes: maskgit (docs/networks.md)
                name="transformer",
                size=768,  # width of the residual stream
                depth=12,  # blocks
                heads=12,
                hidden=0,  # width of the feed-forward layer; 0: 8/3 of size, or 4 size with gelu
                # swiglu | glu, gated by a sigmoid | geglu; gelu | gelu_exact, not gated
                feed_forward="swiglu",
                kv_heads=0,  # heads of keys and values; 0: as many as of queries
                head_dim=0,  # features of a head; 0: size / heads
                qkv_bias=False,  # biases of queries, keys and values
                out_bias=False,  # bias of the output of attention
                shifted=False,  # logits of a position from the features of the one before it
                embedding=0,  # width of the token embeddings, before a linear layer; 0: size
                time_conditioning=True,  # condition on t by adaLN-zero; False: time-free
                condition=0,  # width of the vector of time and class; 0: size
                condition_activation="sum",  # sum | each: of the embeddings of time and class
                time_embedding="plain",  # plain | md4 | dit
                norm="rms",  # rms | layer
                norm_parameters="auto",  # auto | scale | affine
                norm_eps=1e-6,
                positions=0,  # learned position embeddings, as in GPT-2; 0: rotary positions
                rotary_base=10_000.0,
                rotary_scaling=(),  # (factor, low, high, length), as in Llama 3.1; (): none
                rotary_part=1.0,  # fraction of a head's features that are rotated
                rotary_ramp="turns",  # ramp of rotary_scaling: turns | pairs, as in YaRN
                rotary_gain=1.0,  # factor of rotated features, as in YaRN
                rotary_type="float32",  # of cosines and sines: float32 | bfloat16, as SMDM's
                query_scaling=(),  # (beta, length), as in Llama 4; (): none
                head_bias=True,
                tied=False,  # the head uses the embedding's matrix
                initial="lecun",  # initialisation: lecun | depth_scaled | torch
                dropout=0.0,  # dropout rate on the outputs of attention and feed-forward layers
                dropout_shared=False,  # drop the same features at all positions
                attention_dropout=0.0,
                embedding_dropout=0.0,
                qk_norm=False,  # normalise queries and keys
                local_width=0,  # width of a depthwise convolution before attention; 0: none
                scan_blocks=True,  # scan over blocks; False compiles each, which is faster on CPU
                attention="auto",  # kernel: plain | splash (TPU) | cudnn (GPU) | auto, the fastest
                remat="none",  # what the backward pass recomputes: none | dots | full
                # operands of linear layers: float32 | bfloat16, with sums in float32 | auto,
                # bfloat16 on CPUs with instructions for it
                products="auto",
                dtype="float32",  # of the computation: float32 | bfloat16
                causal=False,  # causal attention
                causal_context=False,  # causal attention of clean tokens in block diffusion
                # categorical | truncated_logistic, for ordered symbols: a location and a scale
                output="categorical",
                classes=0,  # number of classes of labelled data; 0: no labels
                tables=0,  # largest number of counts of a table of neighbours; 0: none
                tables_tokens=2**25,  # largest number of training tokens that are counted
                tables_hidden=0,  # hidden units of the MLP that corrects their estimate; 0: none
                experts=0,  # experts in place of each feed-forward layer; 0: a plain layer
                experts_per_token=2,  # experts that each token uses
                expert_hidden=0,  # width of an expert; 0: hidden
                shared_hidden=0,  # width of an additional layer for all tokens; 0: none
                dense_layers=0,  # blocks at the start with a plain feed-forward layer
                router="softmax",  # scores of experts: softmax | sigmoid
                router_normalised=False,  # weights of a token's experts sum to 1
                router_scale=1.0,  # factor of these weights
                router_bias=False,  # a bias of each expert, only for the choice of experts
                router_groups=1,  # groups of experts
                router_groups_taken=1,  # groups from which a token's experts are chosen
                router_block=0,  # tokens of a block that share experts; 0: each chooses from all
                router_block_taken=0,  # experts that they share
                balance=0.0,  # weight of the load-balancing loss, such as 0.01; 0: none
                router_z=0.0,  # weight of the router z-loss, such as 0.001; 0: none
                lora_rank=0,  # rank of the adapter of each linear layer of a block; 0: none
                lora_alpha=16.0,  # an adapter's output is multiplied by lora_alpha / lora_rank
                lora_dropout=0.0,  # dropout rate on the inputs of adapters
                gaps=False,  # predict how many tokens are missing, for variable length
                edits=False,  # predict which masks are deleted: process.name="edits"
                quality=False,  # predict which tokens are right: objective.name="prism"
                parameters="float32",  # dtype of frozen parameters: float32 | bfloat16
                label_dropout=0.0,  # fraction of training sequences whose label is dropped
            ),
            optim=dict(
                name="adamw",  # adamw | muon(learning_rate, adam_learning_rate, momentum, ...)
                learning_rate=3e-4,  # peak
                decay="cosine",  # cosine | linear | constant | rsqrt
                clock="steps",  # progress of the decay: steps | seconds, of train.seconds
                warmup_steps=2000,
                final_fraction=0.0,  # of the peak, at the last step
                b1=0.9,
                b2=0.999,
                eps=1e-8,  # added to the root of the second moment
                weight_decay=0.0,
                decayed="matrices",  # what is decayed: matrices, of linear layers only | all
                process_learning_rate=1e-2,  # for parameters of the forward process (GenMD4's w)
                process_weight_decay=0.0,
                clip=1.0,  # global norm of the gradient of nats per token; 0: none
            ),
            train=dict(
                num_steps=1_000_000,
                batch_size=512,  # sequences, over all devices
                microbatches=0,  # parts of the batch, one after another, to save memory; 0: auto
                seed=0,  # of parameters, data order and noise
                initial="",  # run directory: start from the moving average of its parameters
                trainable="",  # regex of the paths that are trained; '': adapters, or all
                seconds=0.0,  # wall-clock limit of training; 0: none
                time_power=1.0,  # above 1: early times more often, with less weight; the same mean
                ema=0.9999,  # decay of the moving average of the parameters, which is evaluated
                max_skipped_in_a_row=20,  # non-finite steps in a row after which the run stops
            ),
            mesh=dict(
                data=0,  # devices along each axis; 0: all remaining devices
                fsdp=1,
                context=1,
                tensor=1,
            ),
            # Evaluators under any names: likelihood | path | ngrams | information_profile |
            # samples | zero_shot | generative_perplexity | known_words | frechet (of images) |
            # classification (of classifiers). Each runs every `every` steps (0: never), and with
            # final=True also at the end and in --mode eval.
            evals=dict(
                validation=dict(
                    name="likelihood",
                    every=10_000,
                    final=False,
                    split="validation",  # train | validation | test | all
                    data={},  # keys of the section `data` that differ from the run's own
                    draws=1,  # noise draws per sequence
                    batch_size=0,  # sequences; 0: as in training
                    stride=0,  # new tokens of each sequence, given those before; 0: all are new
                    limit=2048,  # sequences that are used, rounded up to whole batches; 0: all
                    seed=0,  # of the noise draws
                    # auto, the tightest bound of the process; or any objective that is a bound
                    # (docs/objectives.md).
                    objective=dict(name="auto"),
                ),
                test=dict(
                    name="likelihood",
                    every=0,
                    final=True,
                    split="test",
                    data={},
                    draws=1,
                    batch_size=0,
                    stride=0,
                    limit=0,
                    seed=0,
                    objective=dict(name="auto"),
                ),
                # N-gram models of at most 20,000,000 tokens, to compare with the bound.
                ngrams=dict(
                    name="ngrams",
                    every=0,
                    final=False,
                    split="test",
                    data={},
                    order=5,
                ),
                # Samples with the settings of the section `sample`.
                samples=dict(
                    name="samples",
                    every=0,
                    final=True,
                ),
            ),
            sample=dict(
                # ancestral | tweedie | euler | tau_leaping(several) | first_hitting |
                # flow(rate), with process uniform or metric_path |
                # predictor_corrector(predictor, corrections, size) | any_order(order, per_step,
                # semi_autoregressive, split) | halton(randomised, sharpened, sharpened_power,
                # warmup_steps), for codes of images |
                # confidence(score, per_step, noise, rule, limit, semi_autoregressive, edit,
                # edit_passes, split, tempered, position_temperature) |
                # remask(strategy, eta, since, until, loop, held) | path_planning(eta, planner) |
                # proseco(corrections, every, order), and the keys of confidence |
                # prism(remasked, eta, since, until, order), and the keys of confidence, with
                # network.quality |
                # reparameterized(score, resample), which is DPLM's |
                # psi(kappa, since, until, greedy_tail), not for masks |
                # entropy_bound(entropy_bound, cooling, stability_threshold,
                # confidence_threshold), with process uniform |
                # metropolis(proposals, level) | left_to_right, for causal networks |
                # insert(order), with process insertion | edit, with process deletion |
                # masked_edit, with process edits |
                # eso(alpha_0, cached) | streaming(width, limit, penalty, cached), both with
                # objective eso or wedlm | longest_prefix(width, limit, score, cached), with
                # objective sdlm | self_speculative(width, cached), with objective sdlm or
                # network.causal_context | resize(grow, masks, per_step, score,
                # noise, expansions, delete_rest), with process resizing
                name="ancestral",
                num=4,  # sequences to draw, of each template
                steps=256,  # reverse steps
                grid="cosine",  # cosine | uniform | log_linear | optimal | times from 1.0 to 0.0
                length=0,  # tokens; 0: as in training
                block=0,  # tokens of a block; 0: objective.block if there is one, else all
                memory=0,  # tokens of earlier blocks that a block sees; 0: as in training
                cached=True,  # cache their keys and values; False: recompute them
                dual_cache=False,  # blocks also see later tokens, as they were before the block
                next_token=False,  # the first token of a block is predicted from the previous block
                stop="",  # end_of_text: a text ends with it, or after the block that contains it
                min_entropy=0.0,  # nats; less in the last `memory` tokens ends a text; 0: never
                label=-1,  # class of the samples, for network.classes > 0; -1: none, or any
                guidance=1.0,  # weight of the label or prompt: 0 ignores it, 1: no guidance
                # Run with objective.name=classifier: guides samples of a model without classes
                # towards its class `label`; docs/samplers.md#classifiers.
                classifier="",
                classifier_strength=1.0,  # 0: not at all; 1: p(x | label)
                classifier_method="exact",  # exact | taylor, which is quick and approximate
                stride=0,  # new tokens of each window, for long texts; 0: one window
                temperature=1.0,  # 0: the most likely token
                top_p=1.0,
                top_k=0,  # 0: all
                exclude="",  # entries of the vocabulary that are never drawn, as "<cls> X"
                late="",  # entries that `confidence` reveals after all others
                batch_size=16,
                seed=0,
                prompt="",  # text that samples begin with
                suffix="",  # text that samples end with
                template="",  # text in which each `blank` is a token to be filled
                templates="",  # a file with a template in each line
                blank="_",
                inpaint="",  # image of which a part is filled in; images only, like the next three
                image_from="",  # or examples of the data: test:3, test:0,3,7
                mask="",  # image whose white pixels are filled in
                box="",  # or a rectangle to fill in: top,left,height,width
                trace=False,  # animate the first sample, and write a page that shows the first 8
                judge="",  # model whose bound of the samples is reported: self | directory of a run
                # Reward r for steering samples towards p(x) exp(strength r(x)):
                # docs/samplers.md#rewards.
                reward=dict(
                    # none | pattern(pattern), matches of a regular expression | judge(judge) |
                    # answer(pattern), for objective.name=policy
                    name="none",
                    strength=1.0,  # below 0: away from the reward
                    particles=4,  # chains of each sample, of which one is returned
                    every=8,  # steps between two evaluations of the reward
                    threshold=0.5,  # resample if the effective sample size is below this fraction
                ),
            ),
            checkpoint=dict(
                every=5000,  # steps between saves
                seconds=0.0,  # longest time between saves; 0: no limit
                keep=3,  # newest checkpoints kept
                keep_every=0,  # steps between checkpoints that are never deleted; 0: none
                best="",  # evaluator whose best checkpoint is kept too; '': none
                retries=5,  # how often a failed save or log write is retried
            ),
            eval=dict(
                checkpoint="newest",  # for evaluation and sampling: newest | best | a step
            ),
            log=dict(
                every=100,  # steps between lines of metrics
                trackers="tensorboard",  # also log metrics to: tensorboard,wandb
                profile=(),  # first and last step of a trace by JAX's profiler: 10,12; (): none
            ),
            audit=dict(
                steps=80,  # steps of gradient ascent of --mode audit
                seed=0,
            ),
            plan=dict(
                topology="v5e:8x8",  # devices for --mode plan: v5e:16x16, v5p:4x4x8, cpu:8
                parts="train,eval,sample",  # programs that it compiles
                random_tokens=0,  # number of symbols, without data; 0: the tokenizer's
            ),
            bench=dict(
                parts="train,eval,sample,data",  # what --mode bench times
                windows=5,  # repetitions, of which the median is reported
                seconds=2.0,  # shortest time of a repetition
                random_tokens=0,  # number of symbols of random tokens; 0: use the data
                names=0,  # number of slowest operations to list, by name in the source; 0: none
            ),
        )
    )
