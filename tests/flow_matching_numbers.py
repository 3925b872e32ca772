"""Numbers of the library flow_matching (arXiv:2412.06264).

Its folder, torch and torchdiffeq on the path, this printed the losses and velocities below:

    import itertools, torch
    from flow_matching.loss import MixturePathGeneralizedKL
    from flow_matching.path import MixtureDiscreteProbPath
    from flow_matching.path.scheduler import PolynomialConvexScheduler
    torch.set_default_dtype(torch.float64)
    logits = torch.tensor(LOGITS); x_1 = torch.tensor([[2, 0, 1]])
    masks = logits.clone(); masks[:, 3] = -torch.inf
    for n, t in itertools.product((1.0, 2.0), (0.1, 0.5, 0.9)):
        path = MixtureDiscreteProbPath(PolynomialConvexScheduler(n=n))
        loss, time = MixturePathGeneralizedKL(path, reduction="none"), torch.tensor([t])
        for out, x_t in [(masks, [3, 3, 3]), (masks, [3, 0, 3]), (logits, [3, 0, 3]),
                         (logits[:, :3], [2, 1, 0])]:
            print(loss(out[None], x_1, torch.tensor([x_t]), time))
        print(path.posterior_to_velocity(logits[None, :, :3], torch.tensor([[2, 1, 0]]), time))
    print(torch.nn.CrossEntropyLoss()(logits[:, :3], x_1[0]))

and this the frequencies of its step, of 4 million draws, for a model that says softmax(out)
always, from z, with c = 0, or c = 1 and all of the source's weight on the mask:

    from flow_matching.solver import MixtureDiscreteEulerSolver
    solver = MixtureDiscreteEulerSolver(model, path, len(out), source)
    solver.sample(torch.full((4_000_000, 1), z), None, time_grid=torch.tensor([0.5, 0.75, 1.0]),
                  return_intermediates=True, div_free=c)[1]

and with the outputs of wrong_denoiser.py, at 1 - t, those of whole samples:

    solver.sample(torch.randint(0, 3, (4_000_000, 2)), None,
                  time_grid=torch.tensor([0.0, 0.3, 0.7, 1.0])) @ torch.tensor([3, 1])
"""

import numpy as np

from md4_jax.processes.schedules import Linear, Power

LOGITS = np.array([[0.3, -0.7, 1.1, 0.2], [-0.4, 0.9, 0.5, -1.2], [0.8, 0.1, -0.6, 0.4]])
X, Z = np.array([[2, 0, 1]]), np.array([[2, 1, 0]])
SCHEDULES = {1: Linear(), 2: Power(2.0)}

# Losses of positions. No output for the mask, masks alone and with one token shown; an output for
# the mask; uniform noise. Keys are their n and t.
ALL_MASKED = {
    (1, 0.1): [0.532338331259, 2.18239657088, 1.39523592483],
    (1, 0.5): [0.958208996265, 3.92831382758, 2.51142466469],
    (1, 0.9): [4.79104498133, 19.6415691379, 12.5571233235],
    (2, 0.1): [0.0967887875016, 0.396799376524, 0.25367925906],
    (2, 0.5): [0.63880599751, 2.61887588506, 1.67428310979],
    (2, 0.9): [4.53888471915, 18.6078023412, 11.8962220959],
}
ONE_SHOWN = {
    (1, 0.1): [0.532338331259, 0.955251000071, 1.39523592483],
    (1, 0.5): [0.958208996265, 1.71945180013, 2.51142466469],
    (1, 0.9): [4.79104498133, 8.59725900064, 12.5571233235],
    (2, 0.1): [0.0967887875016, 0.173682000013, 0.25367925906],
    (2, 0.5): [0.63880599751, 1.14630120009, 1.67428310979],
    (2, 0.9): [4.53888471915, 8.14477168482, 11.8962220959],
}
WITH_MASK = {
    (1, 0.1): [0.558374781933, 0.96449227064, 1.4481571741],
    (1, 0.5): [1.00507460748, 1.73608608715, 2.60668291337],
    (1, 0.9): [5.02537303739, 8.68043043576, 13.0334145669],
    (2, 0.1): [0.101522687624, 0.175362231025, 0.263301304381],
    (2, 0.5): [0.670049738319, 1.15739072477, 1.73778860892],
    (2, 0.9): [4.76087971964, 8.22356567598, 12.3474453791],
}
UNIFORM = {
    (1, 0.1): [0.422958042587, 1.61049958483, 0.757832061975],
    (1, 0.5): [0.761324476657, 2.89889925269, 1.36409771156],
    (1, 0.9): [3.80662238328, 14.4944962634, 6.82048855778],
    (2, 0.1): [0.0769014622886, 0.292818106332, 0.137787647632],
    (2, 0.5): [0.507549651105, 1.93259950179, 0.90939847437],
    (2, 0.9): [3.6062738368, 13.7316280391, 6.46151547579],
}
VELOCITY = {
    (1, 0.1): [
        [0.309207105434, 0.113750937153, -0.422958042587],
        [0.15586011104, -0.539214125058, 0.383354014019],
        [-0.473707248257, 0.316525390873, 0.157181857384],
    ],
    (1, 0.5): [
        [0.556572789781, 0.204751686876, -0.761324476657],
        [0.280548199872, -0.970585425105, 0.690037225233],
        [-0.852673046863, 0.569745703571, 0.282927343292],
    ],
    (1, 0.9): [
        [2.78286394891, 1.02375843438, -3.80662238328],
        [1.40274099936, -4.85292712552, 3.45018612617],
        [-4.26336523432, 2.84872851786, 1.41463671646],
    ],
    (2, 0.1): [
        [0.0562194737153, 0.0206819885733, -0.0769014622886],
        [0.0283382020072, -0.0980389318288, 0.0697007298216],
        [-0.0861285905923, 0.0575500710678, 0.0285785195244],
    ],
    (2, 0.5): [
        [0.371048526521, 0.136501124584, -0.507549651105],
        [0.187032133248, -0.64705695007, 0.460024816822],
        [-0.568448697909, 0.379830469048, 0.188618228861],
    ],
    (2, 0.9): [
        [2.63639742528, 0.969876411517, -3.6062738368],
        [1.32891252571, -4.59750990839, 3.26859738268],
        [-4.03897759041, 2.69879543797, 1.34018215244],
    ],
}
CROSS_ENTROPY = 1.2329912480903895

# Frequencies after a step from t = 0.5 to 0.75, of the first row of logits: from the mask, without
# an output for it, and from symbol 0 of three.
FROM_MASK = {
    1: [0.109342746, 0.040360499, 0.243368745, 0.606927991],
    2: [0.078950003, 0.028957751, 0.175400257, 0.716691971],
}
FROM_TOKEN = {
    1: [0.716459751, 0.040236749, 0.243303493],
    2: [0.795571029, 0.028994, 0.175435007],
}
# The share that stays with c = 1: at the mask, and at a symbol of which the model is sure.
STAYED = {1: (0.3682625, 0.6067330), 2: (0.5134500, 0.3678373)}
DRAWS = 4_000_000
# Frequencies of samples of two tokens, in lexicographic order.
SAMPLED = {
    1: [
        0.096938, 0.107329, 0.15699, 0.10684525, 0.0882995, 0.10753825, 0.13828025, 0.1047965,
        0.09298325,
    ],
    2: [
        0.096517, 0.106367, 0.15471175, 0.10743625, 0.08818075, 0.106816, 0.141292, 0.10606575,
        0.0926135,
    ],
}  # fmt: skip
