#include "elementwise.cuh"

struct swiglu_forward {
    template <class C> __device__ C operator()(C gate, C up) const {
        C rest;
        return gate * sigmoid(gate, rest) * up;
    }
};

struct swiglu_backward {
    template <class C> __device__ void operator()(C grad, C gate, C up, C& grad_gate, C& grad_up) const {
        C rest;
        const C share = sigmoid(gate, rest);
        grad_gate = grad * (up * (share * (C(1) + gate * rest)));
        grad_up = grad * (gate * share);
    }
};
